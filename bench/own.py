"""The project's kernels as `bench.kernels` measures them: programs, visits and bytes of a case."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import tower_visits, visits
from bench.programs import Call, Program
from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.chips import CHIPS, Chip
from tpu_vl.kernels.interpret import Target
from tpu_vl.kernels.paged_attention import blocks as paged_blocks
from tpu_vl.kernels.paged_attention import pages
from tpu_vl.kernels.paged_attention import pallas_tpu as paged_kernel
from tpu_vl.kernels.paged_attention.cases import Case as PagedCase
from tpu_vl.kernels.paged_attention.plan import Plan, padded_group
from tpu_vl.kernels.vision_attention import blocks as vision_blocks
from tpu_vl.kernels.vision_attention import pallas_tpu as vision_kernel
from tpu_vl.kernels.vision_attention.cases import Case as VisionCase
from tpu_vl.kernels.vision_attention.ranges import key_ranges

S = jax.ShapeDtypeStruct
CACHE_BYTES = 512 << 20  # several times any chip's VMEM
COUNTED = Target(CHIPS["v6e"], True)  # visits are counted in the plain interpreter, for any chip


def vision_program(case: VisionCase, blocks: vision_blocks.Blocks) -> Program:
    """The tower attention of a case on one device."""
    sizes = {
        "num_rows": case.num_rows,
        "num_heads": case.num_heads,
        "width": case.width,
        "dtype": case.dtype,
    }
    return Program("own.vision_call", sizes | {"blocks": asdict(blocks)})


def vision_call(
    chip: Chip, num_rows: int, num_heads: int, width: int, dtype: str, blocks: dict[str, int]
) -> Call:
    """What `vision_program` compiles; like every tower program it takes [P, N, H]."""
    target, sizes = Target(chip, False), vision_blocks.Blocks(**blocks)

    def run(*arrays: jax.Array) -> jax.Array:
        return vision_kernel.packed(*arrays, scale=width**-0.5, target=target, blocks=sizes)

    qkv = S((num_rows, num_heads, width), dtype)
    return Call(run, (qkv, qkv, qkv, S((2, num_rows), jnp.int32), S((), jnp.int32)))


def vision_step(case: VisionCase, blocks: vision_blocks.Blocks) -> Program:
    """The kernel alone, in a small grid of the same steps: one program serves many cases.

    A call of one or two steps is compiled as it is: the compiler makes less of so short a loop.
    """
    padded = vision_blocks.padded_rows(case.num_rows, blocks)
    if vision_steps(case, blocks) <= 2:
        num_rows, num_heads, small = padded, case.num_heads, blocks
    else:
        num_rows, num_heads = 2 * max(blocks.queries, blocks.keys), 2 * blocks.heads
        chunks = 1 if blocks.chunk >= padded else 2
        small = replace(blocks, chunk=num_rows // chunks)
    sizes = {
        "num_rows": num_rows,
        "num_heads": num_heads,
        "width": case.width,
        "dtype": case.dtype,
    }
    return Program("own.vision_step_call", sizes | {"blocks": asdict(small)})


def vision_step_call(
    chip: Chip, num_rows: int, num_heads: int, width: int, dtype: str, blocks: dict[str, int]
) -> Call:
    """What `vision_step` compiles: operands as the kernel takes them."""
    target, sizes = Target(chip, False), vision_blocks.Blocks(**blocks)
    lanes, rows = round_up(width, NUM_LANES), vision_blocks.value_rows(width, dtype)
    bounds = S((2, num_rows), jnp.int32)
    # A factor of 1 would not be multiplied.
    run = functools.partial(
        vision_kernel.call, width=width, factor=width**-0.5, target=target, blocks=sizes
    )
    shapes = (
        jax.eval_shape(functools.partial(key_ranges, blocks=sizes), bounds),
        S((num_heads, num_rows, lanes), dtype),
        S((num_heads, num_rows, lanes), dtype),
        S((num_heads, rows, num_rows), dtype),
        S((num_heads, 1, num_rows), jnp.float32),
        bounds,
    )
    return Call(run, shapes)


def vision_steps(case: VisionCase, blocks: vision_blocks.Blocks) -> int:
    """Steps of the grid of a case."""
    padded = vision_blocks.padded_rows(case.num_rows, blocks)
    return case.num_heads // blocks.heads * (padded // blocks.queries) * -(-padded // blocks.chunk)


def vision_counts(case: VisionCase, blocks: vision_blocks.Blocks) -> Counter[str]:
    """Visits of one call, from one group of one head: groups of heads repeat each other."""
    groups = case.num_heads // blocks.heads
    found = _vision_visits(case.num_rows, case.segments, replace(blocks, heads=1))
    return Counter({name: n * groups for name, n in found.items()})


@functools.cache
def _vision_visits(
    num_rows: int, segments: tuple[int, ...], blocks: vision_blocks.Blocks
) -> Counter[str]:
    return _vision_counter(num_rows, blocks)(
        tower_visits.bounds(segments, num_rows), np.int32(sum(segments))
    )


@functools.cache
def _vision_counter(num_rows: int, blocks: vision_blocks.Blocks) -> Callable[..., Counter[str]]:
    qkv = jnp.zeros((num_rows, 1, 8), jnp.float32)

    def run(bounds_2P: jax.Array, num_patches: jax.Array) -> jax.Array:
        return vision_kernel.packed(
            qkv, qkv, qkv, bounds_2P, num_patches, scale=1.0, target=COUNTED, blocks=blocks
        )

    return visits.control_flow(run, S((2, num_rows), jnp.int32), S((), jnp.int32))


def vision_bytes(case: VisionCase, blocks: vision_blocks.Blocks) -> int:
    """Bytes that the tower kernel moves: queries and results once, keys and values per chunk."""
    size = jnp.dtype(case.dtype).itemsize
    lanes = round_up(case.width, NUM_LANES)
    rows = vision_blocks.value_rows(case.width, case.dtype)
    once = vision_blocks.padded_rows(case.num_rows, blocks) * ((lanes + case.width) * size + 4)
    fetches = tower_visits.fetched_chunks(case, blocks)
    return case.num_heads * (once + fetches * blocks.chunk * (lanes + rows) * size)


def paged_program(case: PagedCase, blocks: paged_blocks.Blocks) -> Program:
    """The paged attention of a case on one device."""
    return Program("own.paged_call", paged_sizes(case) | {"blocks": asdict(blocks)})


def paged_sizes(case: PagedCase, num_pages: int | None = None) -> dict[str, Any]:
    """The sizes of a case, as `paged_shapes` takes them, in a cache as large as a real one is.

    XLA would place a small one in VMEM, and the kernel's copies would become loops there.
    """
    if num_pages is None:
        num_pages = CACHE_BYTES // page_bytes(case)
    names = ("num_tokens", "num_seqs", "num_heads", "num_kv_heads", "width", "page_size")
    sizes = {name: getattr(case, name) for name in (*names, "max_pages", "dtype", "cache_dtype")}
    return sizes | {"num_pages": num_pages}


def kv_lens(case: PagedCase) -> list[int]:
    """Cached tokens of each live sequence, the new ones included."""
    return [past + new for past, new in zip(case.past_lens, case.q_lens, strict=True)]


def paged_call(chip: Chip, *, blocks: dict[str, int], **sizes: Any) -> Call:
    """What `paged_program` compiles; it writes the new tokens' K and V too."""
    run = paged_run(sizes["width"], Target(chip, False), paged_blocks.Blocks(**blocks))
    return Call(run, paged_shapes(**sizes), (3,))


def paged_shapes(
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    width: int,
    page_size: int,
    num_pages: int,
    max_pages: int,
    dtype: str,
    cache_dtype: str,
) -> tuple[Any, ...]:
    """Queries, keys, values, cache, scales, page table, starts, lengths; scales may be None."""
    kv = S((num_tokens, num_kv_heads, width), dtype)
    shape = pages.cache_shape(
        num_pages, page_size, num_kv_heads, width, "pallas", dtype=cache_dtype
    )
    return (
        S((num_tokens, num_heads, width), dtype),
        kv,
        kv,
        S(shape, cache_dtype),
        S((2, num_kv_heads), jnp.float32) if is_quantised(cache_dtype) else None,
        S((num_seqs, max_pages), jnp.int32),
        S((num_seqs + 1,), jnp.int32),
        S((num_seqs,), jnp.int32),
    )


def is_quantised(cache_dtype: str) -> bool:
    """Whether pages of that dtype have scales."""
    return cache_dtype not in ("float32", "bfloat16")


def paged_run(width: int, target: Target, blocks: paged_blocks.Blocks) -> Callable[..., Any]:
    """The call as a function of arrays as `paged_shapes` gives them."""

    def run(q: Any, k: Any, v: Any, cache: Any, scales: Any, *addresses: Any) -> Any:
        return paged_kernel.ragged(
            q,
            k,
            v,
            cache,
            pages.Batch(*addresses),
            scale=width**-0.5,
            kv_scales_2K=scales,
            target=target,
            blocks=blocks,
        )

    return run


def paged_counts(case: PagedCase, blocks: paged_blocks.Blocks) -> Counter[str]:
    """Visits of one call; they depend on lengths, pages, key blocks and the tokens of a tile."""
    tile = tile_tokens(case, blocks)
    group = max(1, paged_blocks.LEAST_ROWS // tile)
    single = replace(
        case,
        num_tokens=max(case.num_tokens, paged_blocks.LEAST_ROWS, tile),
        num_heads=group,
        num_kv_heads=1,
        width=8,
        dtype="float32",
        cache_dtype="float32",
        tp=1,
    )
    return _paged_visits(single, replace(blocks, prefill_rows=tile * group))


@functools.cache
def _paged_visits(case: PagedCase, blocks: paged_blocks.Blocks) -> Counter[str]:
    # Nothing is read of queries, keys, values and pages.
    shapes = paged_shapes(**paged_sizes(case, num_pages=1))
    counted = _paged_counter(shapes, blocks)
    return counted(*addresses(case))


@functools.cache
def _paged_counter(
    shapes: tuple[Any, ...], blocks: paged_blocks.Blocks
) -> Callable[..., Counter[str]]:
    q, k, v, cache = (jnp.zeros(s.shape, s.dtype) for s in shapes[:4])
    run = functools.partial(paged_run(q.shape[-1], COUNTED, blocks), q, k, v, cache, None)
    return visits.control_flow(run, *shapes[5:])


def query_group(case: PagedCase) -> int:
    """Query heads per K/V head, as the kernel pads them."""
    return padded_group(case.num_heads // case.num_kv_heads, jnp.dtype(case.dtype))


def tile_tokens(case: PagedCase, blocks: paged_blocks.Blocks) -> int:
    """New tokens of a prefill tile."""
    return blocks.prefill_rows // query_group(case)


def addresses(case: PagedCase) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Page table, starts and lengths of a case; pages follow each other."""
    table_BM = np.zeros((case.num_seqs, case.max_pages), np.int32)
    lens_B = np.zeros(case.num_seqs, np.int32)
    starts_B = np.full(case.num_seqs + 1, sum(case.q_lens), np.int32)
    starts_B[: len(case.q_lens) + 1] = np.concatenate([[0], np.cumsum(case.q_lens)])
    next_page = 0
    for seq, kv_len in enumerate(kv_lens(case)):
        count = -(-kv_len // case.page_size)
        table_BM[seq, :count] = np.arange(next_page, next_page + count)
        lens_B[seq] = kv_len
        next_page += count
    return jnp.asarray(table_BM), jnp.asarray(starts_B), jnp.asarray(lens_B)


def page_bytes(case: PagedCase) -> int:
    """Bytes of one page on one device."""
    shape = pages.cache_shape(
        1, case.page_size, case.num_kv_heads, case.width, "pallas", dtype=case.cache_dtype
    )
    return int(np.prod(shape)) * jnp.dtype(case.cache_dtype).itemsize


def query_bytes(case: PagedCase) -> int:
    """Bytes of the live queries and results on one device, and of the K and V that are written."""
    rows = sum(case.q_lens)
    heads = 2 * case.num_heads + 2 * case.num_kv_heads
    return rows * heads * round_up(case.width, NUM_LANES) * jnp.dtype(case.dtype).itemsize


def row_bytes(case: PagedCase) -> int:
    """Bytes of the rows that lie in HBM between the ends of the kernel and its attention, written
    and read: live queries and results, and the new K and V."""
    query_rows = 2 * _paged_plan(case, COUNTED.chip).query_rows
    rows_bytes = query_rows * NUM_LANES * jnp.dtype(case.dtype).itemsize
    return 2 * sum(case.q_lens) * (rows_bytes + page_bytes(case) // case.page_size)


def paged_blocks_of(
    case: PagedCase, chip: Chip, wanted: paged_blocks.Blocks | None = None
) -> paged_blocks.Blocks:
    """The block sizes that the kernel takes on one device: `wanted` or its own, made to fit."""
    return _paged_plan(case, chip, wanted).blocks


def _paged_plan(case: PagedCase, chip: Chip, wanted: paged_blocks.Blocks | None = None) -> Plan:
    shapes = paged_shapes(**paged_sizes(case))
    return paged_kernel.make_plan(
        shapes[0],
        shapes[1],
        shapes[3],
        pages.Batch(*shapes[5:]),
        case.width**-0.5,
        shapes[4],
        Target(chip, False),
        wanted,
    )


def fetched_pages(case: PagedCase, blocks: paged_blocks.Blocks) -> int:
    """Pages that the kernel copies to VMEM: of each tile those up to its causal limit."""
    tile, size, total = tile_tokens(case, blocks), case.page_size, 0
    for new, past in zip(case.q_lens, case.past_lens, strict=True):
        step = 1 if new == 1 else tile
        total += sum(-(-(past + end) // size) for end in (*range(step, new, step), new))
    return total
