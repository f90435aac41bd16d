"""Paged attention on TPUs: one kernel writes the new tokens' K and V and attends to the pages.

Two phases, chosen by data: `decode.run` for sequences with one new token, `prefill.run` for longer
runs. Both visit only the key blocks below each tile's causal limit and copy only pages that exist.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.interpret import Target
from tpu_vl.kernels.paged_attention import blocks as block_sizes
from tpu_vl.kernels.paged_attention import decode, prefill
from tpu_vl.kernels.paged_attention.blocks import SUBLANES, Blocks, Sizes, fit, pick_blocks
from tpu_vl.kernels.paged_attention.pages import Batch, new_rows
from tpu_vl.kernels.paged_attention.plan import Plan, ceil_quotient, padded_group, quotient
from tpu_vl.kernels.paged_attention.stream import Stream, TileList
from tpu_vl.kernels.paged_attention.tiles import Tiles, make_tiles

LOG2_E = math.log2(math.e)


def ragged(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_LSCH: jax.Array,
    batch: Batch,
    *,
    scale: float,
    kv_scales_2K: jax.Array | None,
    target: Target,
    blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel on one device's heads; arguments as in `api.paged_attention`.

    Args:
        target: chip, and whether the kernel is interpreted.
        blocks: sizes; None: those of blocks.py.

    Raises:
        ValueError: the pages are not 128 lanes wide, or no block sizes fit the chip.
    """
    num_tokens, num_seqs = q_TNH.shape[0], batch.page_table_BM.shape[0]
    plan = make_plan(q_TNH, k_TKH, pages_LSCH, batch, scale, kv_scales_2K, target, blocks)
    single_B = batch.q_lens_B == 1
    decode_tiles = make_tiles(batch, jnp.where(single_B, 1, 0), 1, min(num_tokens, num_seqs))
    tile = plan.blocks.prefill_rows // plan.group
    prefill_tiles = make_tiles(
        batch,
        jnp.where(single_B, 0, batch.q_lens_B),
        tile,
        min(num_tokens, num_tokens // tile + num_seqs),
    )
    rows = new_rows(k_TKH, v_TKH, pages_LSCH, kv_scales_2K)
    scales = jnp.ones((2, k_TKH.shape[1]), jnp.float32) if kv_scales_2K is None else kv_scales_2K
    keys = block_pages(plan, plan.blocks.decode_keys) * plan.page_size
    num_items = ((decode_tiles.limit_I + keys - 1) // keys).sum()
    counts = jnp.stack(
        [decode_tiles.num_live, prefill_tiles.num_live, batch.q_starts_B[-1], num_items]
    )
    out, pages_LSCH = call(
        plan,
        counts.astype(jnp.int32),
        flat_tiles(decode_tiles),
        flat_tiles(prefill_tiles),
        batch.page_table_BM.reshape(-1),
        scales.reshape(-1),
        query_rows(plan, q_TNH),
        rows,
        pages_LSCH,
        target,
    )
    valid_T = jnp.arange(num_tokens) < batch.q_starts_B[-1]
    out_TNH = result_heads(plan, out, q_TNH.shape)
    return jnp.where(valid_T[:, None, None], out_TNH, 0), pages_LSCH


def make_plan(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    pages_LSCH: jax.Array,
    batch: Batch,
    scale: float,
    kv_scales_2K: jax.Array | None,
    target: Target,
    blocks: Blocks | None,
) -> Plan:
    """The static sizes of a call."""
    page_size, num_rows, lanes = pages_LSCH.shape[1:]
    if lanes != NUM_LANES:
        raise ValueError(
            f"pages_LSCH is {lanes} wide; 'pallas' needs {NUM_LANES}: allocate it with "
            "cache_shape(..., implementation='pallas')"
        )
    num_heads, num_kv_heads = q_TNH.shape[1], k_TKH.shape[1]
    group = padded_group(num_heads // num_kv_heads, q_TNH.dtype)
    num_parts = -(-q_TNH.shape[2] // NUM_LANES)
    sizes = Sizes(
        num_rows=num_rows,
        cache_bytes=pages_LSCH.dtype.itemsize,
        query_rows=num_parts * round_up(num_kv_heads * group, SUBLANES),
        group=group,
        query_bytes=q_TNH.dtype.itemsize,
        num_kv_heads=num_kv_heads,
        width=num_parts * NUM_LANES,
    )
    if blocks is None:
        shape = (num_heads, num_kv_heads, q_TNH.shape[2], page_size, pages_LSCH.dtype.name)
        blocks = pick_blocks(*shape, target.chip)
    blocks = fit(blocks, sizes, page_size, q_TNH.shape[0], target.chip)
    # Twice the estimate, since what leaves the registers is not known before; all of VMEM would
    # keep XLA from fetching the next weights into the rest while the kernel runs.
    vmem_bytes = 2 * block_sizes.vmem_bytes(blocks, sizes, page_size)
    return Plan(
        num_kv_heads=num_kv_heads,
        group=group,
        num_parts=num_parts,
        page_size=page_size,
        num_rows=num_rows,
        max_pages=batch.page_table_BM.shape[1],
        dtype=q_TNH.dtype,
        cache_dtype=pages_LSCH.dtype,
        scale=scale,
        quantised=kv_scales_2K is not None,
        blocks=blocks,
        vmem_bytes=min(vmem_bytes, block_sizes.vmem_limit_bytes(target.chip)),
        interpreted=bool(target.interpret),
    )


def flat_tiles(tiles: Tiles) -> jax.Array:
    """The fields of tiles as the kernel reads them from scalar memory."""
    fields = (tiles.seq_I, tiles.row_I, tiles.num_rows_I, tiles.limit_I)
    return jnp.concatenate(fields).astype(jnp.int32)


def query_rows(plan: Plan, q_TNH: jax.Array) -> jax.Array:
    """Queries as rows of 128 lanes: [T, part, head and group, 128], padded with zeros."""
    num_tokens, num_heads, width = q_TNH.shape
    group = num_heads // plan.num_kv_heads
    q = q_TNH.reshape(num_tokens, plan.num_kv_heads, group, width)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, plan.group - group), (0, plan.width - width)))
    q = q.reshape(num_tokens, plan.num_kv_heads * plan.group, plan.num_parts, NUM_LANES)
    q = jnp.pad(q, ((0, 0), (0, plan.part_rows - q.shape[1]), (0, 0), (0, 0)))
    return jnp.swapaxes(q, 1, 2).reshape(num_tokens, plan.query_rows, NUM_LANES)


def result_heads(plan: Plan, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `query_rows`."""
    num_tokens, num_heads, width = shape
    out = rows.reshape(num_tokens, plan.num_parts, plan.part_rows, NUM_LANES)
    out = jnp.swapaxes(out, 1, 2)[:, : plan.num_kv_heads * plan.group]
    out = out.reshape(num_tokens, plan.num_kv_heads, plan.group, plan.width)
    return out[:, :, : num_heads // plan.num_kv_heads, :width].reshape(shape)


@partial(jax.jit, static_argnames=("plan", "target"))
def call(
    plan: Plan,
    counts: jax.Array,
    decode_tiles: jax.Array,
    prefill_tiles: jax.Array,
    table: jax.Array,
    scales: jax.Array,
    q: jax.Array,
    rows: jax.Array,
    pages: jax.Array,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """The pallas_call; jitted, so that the layers of a model share one trace and one lowering."""
    # XLA would put small arrays into VMEM, where a copy is a loop of loads and stores.
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    if not target.interpret:
        q, rows = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (q, rows))
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        lambda *refs: _kernel(plan, *refs),
        name="paged_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[smem, hbm, hbm, hbm],
            out_specs=[hbm, hbm],
            scratch_shapes=_scratch(plan),
        ),
        out_shape=[
            pltpu.HBM(q.shape, q.dtype),
            pltpu.HBM(pages.shape, pages.dtype),
        ],
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=plan.vmem_bytes,
            disable_bounds_checks=True,
        ),
        interpret=target.interpret,
    )(counts, decode_tiles, prefill_tiles, table, scales, q, rows, pages)


def block_pages(plan: Plan, keys: int) -> int:
    """Pages of a key block of about `keys` tokens: whole pages and whole lanes."""
    unit = math.lcm(plan.page_size, NUM_LANES)
    return max(1, keys // unit) * unit // plan.page_size


def _scratch(plan: Plan) -> list[Any]:
    sizes, num_bufs = plan.blocks, plan.blocks.num_bufs
    pages = max(block_pages(plan, k) for k in (sizes.decode_keys, sizes.prefill_keys))
    keys, tile = pages * plan.page_size, sizes.prefill_rows // plan.group
    row = (plan.query_rows, NUM_LANES)
    return [
        pltpu.VMEM((num_bufs, keys, plan.num_rows, NUM_LANES), plan.cache_dtype),
        pltpu.VMEM((num_bufs, 1, *row), plan.dtype),
        pltpu.VMEM((num_bufs, 1, *row), plan.dtype),
        pltpu.VMEM((num_bufs, tile, *row), plan.dtype),
        pltpu.VMEM((1, tile, *row), plan.dtype),
        *decode.scratch(plan, block_pages(plan, sizes.decode_keys) * plan.page_size),
        *prefill.scratch(plan),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((num_bufs,)),
        pltpu.SemaphoreType.DMA((num_bufs,)),
        pltpu.SemaphoreType.DMA((num_bufs,)),
        pltpu.SemaphoreType.DMA((1,)),
    ]


def _kernel(
    plan: Plan,
    counts: Any,
    decode_flat: Any,
    prefill_flat: Any,
    table: Any,
    scales: Any,
    q_hbm: Any,
    rows_hbm: Any,
    pages_in: Any,
    out_hbm: Any,
    pages_hbm: Any,
    kv_bufs: Any,
    q_single: Any,
    out_single: Any,
    q_tile: Any,
    out_tile: Any,
    decode_logits: Any,
    decode_tops: Any,
    decode_totals: Any,
    decode_sums: Any,
    shifts: Any,
    totals: Any,
    sums: Any,
    landed: Any,
    kv_sems: Any,
    q_sems: Any,
    out_sems: Any,
    write_sem: Any,
) -> None:
    del pages_in  # the same memory as pages_hbm

    def factor(head: int) -> Any:
        return plan.scale * LOG2_E * scales[head]

    def value_scale(head: int) -> Any:
        return scales[plan.num_kv_heads + head]

    def stream(flat: Any, num_tiles: Any, keys: int, q_bufs: Any, out_bufs: Any) -> Stream:
        size = block_pages(plan, keys)
        return Stream(
            plan=plan,
            tiles=TileList(flat, num_tiles),
            single=q_bufs is q_single,
            block_pages=size,
            table=table,
            q_hbm=q_hbm,
            out_hbm=out_hbm,
            pages_hbm=pages_hbm,
            q_bufs=q_bufs,
            out_bufs=out_bufs,
            kv_bufs=kv_bufs.at[:, pl.ds(0, size * plan.page_size)],
            q_sems=q_sems,
            out_sems=out_sems,
            kv_sems=kv_sems,
        )

    singles = stream(decode_flat, counts[0], plan.blocks.decode_keys, q_single, out_single)
    runs = stream(prefill_flat, counts[1], plan.blocks.prefill_keys, q_tile, out_tile)
    landed[0] = 0
    sem = write_sem.at[0]

    @pl.loop(0, counts[0])
    def _(tile: Any) -> None:
        with jax.named_scope("write_token"):
            _write(plan, singles, tile, 0, rows_hbm, sem)

    @pl.loop(0, counts[1])
    def _(tile: Any) -> None:
        with jax.named_scope("write_tile"):
            end = runs.tiles.limit(tile)
            first = quotient(end - runs.tiles.num_rows(tile), plan.page_size)

            @pl.loop(0, ceil_quotient(end, plan.page_size) - first)
            def _(piece: Any) -> None:
                with jax.named_scope("write_piece"):
                    _write(plan, runs, tile, piece, rows_hbm, sem)

    def land() -> None:
        @pl.when((landed[0] == 0) & (counts[2] > 0))
        def _() -> None:
            written = rows_hbm.at[pl.ds(0, counts[2])]
            pltpu.make_async_copy(written, written, sem).wait()
            landed[0] = 1

    state = decode.State(decode_logits, decode_tops, decode_totals, decode_sums)
    decode.run(singles, counts[3], land, factor, value_scale, state)
    land()
    prefill.run(runs, factor, value_scale, prefill.State(shifts, totals, sums))


def _write(plan: Plan, stream: Stream, tile: Any, piece: Any, rows_hbm: Any, sem: Any) -> None:
    """Starts the copy of a tile's new tokens into one of their pages."""
    tiles, size = stream.tiles, plan.page_size
    end = tiles.limit(tile)
    start = end - (1 if stream.single else tiles.num_rows(tile))
    page = quotient(start, size) + piece
    low = jnp.maximum(start, page * size)
    count = 1 if stream.single else jnp.minimum(end, (page + 1) * size) - low
    target = stream.table[tiles.seq(tile) * plan.max_pages + page]
    pltpu.make_async_copy(
        rows_hbm.at[pl.ds(tiles.row(tile) + low - start, count)],
        stream.pages_hbm.at[target, pl.ds(low - page * size, count)],
        sem,
    ).start()
