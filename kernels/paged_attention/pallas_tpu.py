"""Paged attention on TPUs: one kernel writes the new tokens' K and V and attends to the pages.

Two phases, chosen by data: `decode.run` for sequences with one new token, `prefill.run` for longer
runs. Both visit only the key blocks below each tile's causal limit and copy only pages that exist.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.interpret import Target
from tpu_vl.kernels.paged_attention import blocks as block_sizes
from tpu_vl.kernels.paged_attention import decode, prefill, rows
from tpu_vl.kernels.paged_attention.blocks import SUBLANES, Blocks, Sizes, fit, pick_blocks
from tpu_vl.kernels.paged_attention.pages import Batch, new_rows
from tpu_vl.kernels.paged_attention.plan import Plan, ceil_quotient, padded_group, quotient
from tpu_vl.kernels.paged_attention.rope import Rope, queries_and_keys
from tpu_vl.kernels.paged_attention.rows import Ends, Sources
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
    rope: Rope | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel on one device's heads; arguments as in `api.paged_attention`.

    Args:
        target: chip, and whether the kernel is interpreted.
        blocks: sizes; None: those of blocks.py.

    Raises:
        ValueError: the pages are not 128 lanes wide, no block sizes fit the chip, or the page table
            does not fit its scalar memory.
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
    ends = rows.make_ends(plan, q_TNH, None if rope is None else rope.eps)
    plan = replace(plan, vmem_bytes=plan.vmem_bytes + rows.vmem_bytes(plan, ends))
    scales = jnp.ones((2, k_TKH.shape[1]), jnp.float32) if kv_scales_2K is None else kv_scales_2K
    keys = block_pages(plan, plan.blocks.decode_keys) * plan.page_size
    num_items = ((decode_tiles.limit_I + keys - 1) // keys).sum()
    counts = jnp.stack(
        [decode_tiles.num_live, prefill_tiles.num_live, batch.q_starts_B[-1], num_items]
    )
    ready = None
    if plan.quantised:
        turned_TKH = k_TKH if rope is None else queries_and_keys(q_TNH, k_TKH, rope)[1]
        ready = new_rows(turned_TKH, v_TKH, pages_LSCH, kv_scales_2K)
    out, pages_LSCH = call(
        plan,
        ends,
        counts.astype(jnp.int32),
        flat_tiles(decode_tiles),
        flat_tiles(prefill_tiles),
        batch.page_table_BM.reshape(-1),
        scales.reshape(-1),
        rows.make_sources(plan, ends, q_TNH, k_TKH, v_TKH, ready, rope),
        pages_LSCH,
        target,
    )
    return rows.result_heads(plan, ends, out, num_tokens), pages_LSCH


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
    num_tokens = q_TNH.shape[0]
    blocks = fit(blocks, sizes, page_size, num_tokens, target.chip)
    tile = blocks.prefill_rows // group
    num_seqs, max_pages = batch.page_table_BM.shape
    block_sizes.check_scalar_memory(num_seqs, max_pages, page_size, num_tokens, tile)
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


@partial(jax.jit, static_argnames=("plan", "ends", "target"))
def call(
    plan: Plan,
    ends: Ends,
    counts: jax.Array,
    decode_tiles: jax.Array,
    prefill_tiles: jax.Array,
    table: jax.Array,
    scales: jax.Array,
    sources: Sources,
    pages: jax.Array,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """The pallas_call; jitted, so that the layers of a model share one trace and one lowering."""
    # XLA would put small arrays into VMEM, where a copy is a loop of loads and stores.
    hbm, smem = (pl.BlockSpec(memory_space=x) for x in (pltpu.HBM, pltpu.SMEM))
    given = sources.present()
    specs = [pl.BlockSpec() if name in rows.NORMS else hbm for name in given]
    arrays = list(given.values())
    if not target.interpret:
        for i, spec in enumerate(specs):
            if spec is hbm:
                arrays[i] = pltpu.with_memory_space_constraint(arrays[i], pltpu.HBM)
    num_tokens, num_inputs = ends.num_tokens, 6 + len(arrays)
    made = [] if plan.quantised else [pltpu.HBM((num_tokens, *pages.shape[2:]), pages.dtype)]
    out, pages, *_ = pl.pallas_call(
        lambda *refs: _kernel(plan, ends, tuple(given), *refs),
        name="paged_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[smem, *specs, hbm],
            out_specs=[hbm] * (3 + len(made)),
            scratch_shapes=_scratch(plan, ends, sources),
        ),
        out_shape=[
            pltpu.HBM((num_tokens, ends.num_heads * plan.width), plan.dtype),
            pltpu.HBM(pages.shape, pages.dtype),
            pltpu.HBM((num_tokens, plan.query_rows, NUM_LANES), plan.dtype),
            *made,
        ],
        input_output_aliases={num_inputs - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=plan.vmem_bytes,
            disable_bounds_checks=True,
        ),
        interpret=target.interpret,
    )(counts, decode_tiles, prefill_tiles, table, scales, *arrays, pages)
    return out, pages


def block_pages(plan: Plan, keys: int) -> int:
    """Pages of a key block of about `keys` tokens: whole pages and whole lanes."""
    unit = math.lcm(plan.page_size, NUM_LANES)
    return max(1, keys // unit) * unit // plan.page_size


def _scratch(plan: Plan, ends: Ends, sources: Sources) -> list[Any]:
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
        *rows.scratch(plan, ends, plan.dtype if sources.cos_TH is None else sources.cos_TH.dtype),
    ]


class Scratch(NamedTuple):
    """References of `_scratch` but for those of the ends."""

    kv_bufs: Any
    q_single: Any
    out_single: Any
    q_tile: Any
    out_tile: Any
    decode_logits: Any
    decode_tops: Any
    decode_totals: Any
    decode_sums: Any
    shifts: Any
    totals: Any
    sums: Any
    landed: Any
    kv_sems: Any
    q_sems: Any
    out_sems: Any
    write_sem: Any


def _kernel(
    plan: Plan,
    ends: Ends,
    names: tuple[str, ...],
    counts: Any,
    decode_flat: Any,
    prefill_flat: Any,
    table: Any,
    scales: Any,
    *refs: Any,
) -> None:
    sources = rows.Sources(**dict(zip(names, refs, strict=False)))
    _, out_hbm, pages_hbm, q_hbm, *others = refs[len(names) :]  # the pages come in and go out
    if sources.rows_TCH is None:
        rows_hbm, *others = others
    else:
        rows_hbm = sources.rows_TCH
    own, ends_bufs = others[: len(Scratch._fields)], others[len(Scratch._fields) :]
    bufs, ends_bufs = Scratch(*own), rows.Buffers(*ends_bufs)

    def factor(head: int) -> Any:
        return plan.scale * LOG2_E * scales[head]

    def value_scale(head: int) -> Any:
        return scales[plan.num_kv_heads + head]

    def stream(flat: Any, num_tiles: Any, keys: int, q_bufs: Any, out_bufs: Any) -> Stream:
        size = block_pages(plan, keys)
        return Stream(
            plan=plan,
            tiles=TileList(flat, num_tiles),
            single=q_bufs is bufs.q_single,
            block_pages=size,
            table=table,
            q_hbm=q_hbm,
            pages_hbm=pages_hbm,
            q_bufs=q_bufs,
            out_bufs=out_bufs,
            kv_bufs=bufs.kv_bufs.at[:, pl.ds(0, size * plan.page_size)],
            q_sems=bufs.q_sems,
            out_sems=bufs.out_sems,
            kv_sems=bufs.kv_sems,
        )

    singles = stream(
        decode_flat, counts[0], plan.blocks.decode_keys, bufs.q_single, bufs.out_single
    )
    runs = stream(prefill_flat, counts[1], plan.blocks.prefill_keys, bufs.q_tile, bufs.out_tile)
    rows.enter(plan, ends, counts[2], sources, q_hbm, rows_hbm, ends_bufs)
    landed, sem = bufs.landed, bufs.write_sem.at[0]
    landed[0] = 0

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

    state = decode.State(bufs.decode_logits, bufs.decode_tops, bufs.decode_totals, bufs.decode_sums)
    decode.run(singles, counts[3], land, factor, value_scale, state)
    land()
    state = prefill.State(bufs.shifts, bufs.totals, bufs.sums)
    prefill.run(runs, factor, value_scale, state)
    rows.leave(plan, ends, counts[2], q_hbm, out_hbm, ends_bufs)


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
