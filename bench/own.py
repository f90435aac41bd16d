"""The project's kernels as `bench.kernels` measures them: programs, visits and bytes of a case."""

import functools
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from bench import visits
from bench.programs import Call, Program
from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.chips import Chip
from tpu_vl.kernels.interpret import Target
from tpu_vl.kernels.paged_attention import blocks as paged_blocks
from tpu_vl.kernels.paged_attention import pages
from tpu_vl.kernels.paged_attention import pallas_tpu as paged_kernel
from tpu_vl.kernels.paged_attention.cases import Case as PagedCase
from tpu_vl.kernels.paged_attention.plan import padded_group
from tpu_vl.kernels.paged_attention.tiles import make_tiles
from tpu_vl.kernels.vision_attention import blocks as vision_blocks
from tpu_vl.kernels.vision_attention import pallas_tpu as vision_kernel
from tpu_vl.kernels.vision_attention.cases import Case as VisionCase
from tpu_vl.kernels.vision_attention.ranges import key_ranges

S = jax.ShapeDtypeStruct
CACHE_BYTES = 512 << 20  # several times any chip's VMEM


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


def vision_bounds(case: VisionCase) -> np.ndarray:
    """`bounds_2P` of a case; zeros for padding."""
    ends = np.cumsum(case.segments, dtype=np.int32)
    starts = ends - np.asarray(case.segments, np.int32)
    bounds_2P = np.zeros((2, case.num_rows), np.int32)
    bounds_2P[:, : sum(case.segments)] = np.repeat(np.stack([starts, ends]), case.segments, axis=1)
    return bounds_2P


def vision_counts(case: VisionCase, blocks: vision_blocks.Blocks, chip: Chip) -> Counter[str]:
    """Visits of one call, from one group of one head: groups of heads repeat each other."""
    groups = case.num_heads // blocks.heads
    single = replace(case, num_heads=1, dtype="float32", tp=1)
    found = _vision_visits(single, replace(blocks, heads=1), chip)
    return Counter({name: n * groups for name, n in found.items()})


@functools.cache
def _vision_visits(case: VisionCase, blocks: vision_blocks.Blocks, chip: Chip) -> Counter[str]:
    shape = (case.num_rows, case.num_heads, case.width)
    q = k = v = jnp.zeros(shape, case.dtype)
    target = Target(chip, True)  # no copies of its own: the plain interpreter does, and is fast

    def run() -> jax.Array:
        return vision_kernel.packed(
            q,
            k,
            v,
            jnp.asarray(vision_bounds(case)),
            jnp.int32(sum(case.segments)),
            scale=case.width**-0.5,
            target=target,
            blocks=blocks,
        )

    return visits.count(run, products=False)


def vision_bytes(case: VisionCase, blocks: vision_blocks.Blocks) -> int:
    """Bytes that the tower kernel moves: queries and results once, keys and values per chunk."""
    size = jnp.dtype(case.dtype).itemsize
    lanes = round_up(case.width, NUM_LANES)
    rows = vision_blocks.value_rows(case.width, case.dtype)
    padded = vision_blocks.padded_rows(case.num_rows, blocks)
    bounds_2P = np.pad(vision_bounds(case), ((0, 0), (0, padded - case.num_rows)))
    ranges = key_ranges(jnp.asarray(bounds_2P), blocks)
    first_I, last_I = np.asarray(ranges.chunk_first_I), np.asarray(ranges.chunk_last_I)
    steps = np.arange(-(-padded // blocks.chunk))
    visited = np.minimum(first_I[:, None] + steps, last_I[:, None]).reshape(-1)
    fetches = 1 + int((visited[1:] != visited[:-1]).sum())  # the pipeline keeps an equal block
    once = padded * (lanes + case.width) * size + padded * 4
    return case.num_heads * (once + fetches * blocks.chunk * (lanes + rows) * size)


def paged_program(case: PagedCase, blocks: paged_blocks.Blocks) -> Program:
    """The paged attention of a case on one device."""
    return Program("own.paged_call", paged_sizes(case) | {"blocks": asdict(blocks)})


def paged_sizes(case: PagedCase) -> dict[str, Any]:
    """The sizes of a case, as `paged_shapes` takes them, in a cache as large as a real one is.

    XLA would place a small one in VMEM, and the kernel's copies would become loops there.
    """
    names = ("num_tokens", "num_seqs", "num_heads", "num_kv_heads", "width", "page_size")
    sizes = {name: getattr(case, name) for name in (*names, "max_pages", "dtype", "cache_dtype")}
    return sizes | {"num_pages": max(num_live_pages(case), CACHE_BYTES // page_bytes(case))}


def num_live_pages(case: PagedCase) -> int:
    """Pages that the case's sequences fill."""
    return max(1, sum(-(-n // case.page_size) for n in kv_lens(case)))


def kv_lens(case: PagedCase) -> list[int]:
    """Cached tokens of each live sequence, the new ones included."""
    return [past + new for past, new in zip(case.past_lens, case.q_lens, strict=True)]


def paged_call(chip: Chip, *, blocks: dict[str, int], **sizes: Any) -> Call:
    """What `paged_program` compiles; it writes the new tokens' K and V too."""
    run = _paged_run(sizes["width"], Target(chip, False), paged_blocks.Blocks(**blocks))
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


def _paged_run(width: int, target: Target, blocks: paged_blocks.Blocks) -> Any:
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


def paged_counts(case: PagedCase, blocks: paged_blocks.Blocks, chip: Chip) -> Counter[str]:
    """Visits of one call, with one K/V head: the number of heads does not change them."""
    group = case.num_heads // case.num_kv_heads
    single = replace(
        case, num_kv_heads=1, num_heads=group, width=NUM_LANES, cache_dtype=case.dtype, tp=1
    )
    return _paged_visits(single, blocks, chip)


@functools.cache
def _paged_visits(case: PagedCase, blocks: paged_blocks.Blocks, chip: Chip) -> Counter[str]:
    sizes: dict[str, Any] = paged_sizes(case) | {"num_pages": num_live_pages(case)}
    q, k, v, cache = (jnp.zeros(s.shape, s.dtype) for s in paged_shapes(**sizes)[:4])
    run = _paged_run(case.width, Target(chip, pltpu.InterpretParams()), blocks)
    return visits.count(lambda: run(q, k, v, cache, None, *addresses(case)), products=False)


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


def paged_blocks_of(
    case: PagedCase, chip: Chip, wanted: paged_blocks.Blocks | None = None
) -> paged_blocks.Blocks:
    """The block sizes that the kernel takes on one device: `wanted` or its own, made to fit."""
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
    ).blocks


def fetched_pages(case: PagedCase, blocks: paged_blocks.Blocks) -> int:
    """Pages that the kernel copies to VMEM: of each tile those up to its causal limit."""
    table_BM, starts_B, lens_B = addresses(case)
    batch = pages.Batch(table_BM, starts_B, lens_B)
    single_B = batch.q_lens_B == 1
    group = padded_group(case.num_heads // case.num_kv_heads, jnp.dtype(case.dtype))
    total = 0
    for tile, lens in (
        (1, jnp.where(single_B, 1, 0)),
        (blocks.prefill_rows // group, jnp.where(single_B, 0, batch.q_lens_B)),
    ):
        tiles = make_tiles(batch, lens, tile, case.num_tokens // tile + case.num_seqs)
        limits = np.asarray(tiles.limit_I)[: int(tiles.num_live)]
        total += int((-(-limits // case.page_size)).sum())
    return total
