"""Visits of the tower kernel's blocks by arithmetic, for tuning: hundreds of sizes in seconds.

`own.vision_counts` runs the kernel in the interpreter instead; a test holds the two together.
"""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from tpu_vl.kernels.vision_attention.blocks import Blocks, padded_rows
from tpu_vl.kernels.vision_attention.cases import Case
from tpu_vl.kernels.vision_attention.ranges import Ranges, key_ranges


def bounds(segments: tuple[int, ...], num_rows: int) -> np.ndarray:
    """`bounds_2P` of segments that follow each other; zeros for padding."""
    ends = np.cumsum(segments, dtype=np.int32)
    starts = ends - np.asarray(segments, np.int32)
    bounds_2P = np.zeros((2, num_rows), np.int32)
    bounds_2P[:, : sum(segments)] = np.repeat(np.stack([starts, ends]), segments, axis=1)
    return bounds_2P


def fetched_chunks(case: Case, blocks: Blocks) -> int:
    """Chunks of keys that are copied for a group of heads: the pipeline keeps an equal one."""
    ranges = _ranges(case.segments, case.num_rows, replace(blocks, heads=1))
    steps = np.arange(_num_chunks(case, blocks))
    visited = np.minimum(ranges.chunk_first_I[:, None] + steps, ranges.chunk_last_I[:, None])
    visited = visited.reshape(-1)
    return 1 + int((visited[1:] != visited[:-1]).sum())


def counts(case: Case, blocks: Blocks) -> Counter[str]:
    """Visits of one call by name; of blocks whose exponentials overflow there are none."""
    ranges = _ranges(case.segments, case.num_rows, replace(blocks, heads=1))
    num_blocks, num_chunks = len(ranges.first_I), _num_chunks(case, blocks)
    found: Counter[str] = Counter(raise_shifts=0, top_tile=0, step=num_blocks * num_chunks)
    if num_chunks > 1:
        found.update(start=num_blocks, finish=num_blocks)
    has_narrow = blocks.queries > blocks.tile
    narrow_I = (ranges.trips_I > 0) & has_narrow
    for index in range(num_chunks):
        first_I, last_I, full_first_I, full_last_I = _in_chunk(ranges, index, blocks)
        works_I = (first_I < last_I) | (num_chunks == 1)
        wide_I = works_I & ~narrow_I
        full = int((full_last_I - full_first_I)[wide_I].sum())
        found.update(
            attempt=int(works_I.sum()),
            full_block=full,
            border_block=int((last_I - first_I)[wide_I].sum()) - full,
        )
        if num_chunks > 1:
            found.update(chunk=int(works_I.sum()))
        if has_narrow:
            found.update(
                wide=int(wide_I.sum()),
                narrow=int((works_I & narrow_I).sum()),
                narrow_tiles=int(ranges.trips_I[works_I].sum()),
            )
    groups = case.num_heads // blocks.heads
    return Counter({name: n * groups for name, n in found.items()})


def _num_chunks(case: Case, blocks: Blocks) -> int:
    return -(-padded_rows(case.num_rows, blocks) // blocks.chunk)


def _in_chunk(ranges: Ranges, index: int, blocks: Blocks) -> list[np.ndarray]:
    per_chunk = blocks.chunk // blocks.keys
    chunk_I = np.asarray(ranges.chunk_first_I) + index
    return [
        np.clip(x, chunk_I * per_chunk, (chunk_I + 1) * per_chunk)
        for x in (ranges.first_I, ranges.last_I, ranges.full_first_I, ranges.full_last_I)
    ]


@functools.cache
def _ranges(segments: tuple[int, ...], num_rows: int, blocks: Blocks) -> Ranges:
    """As arrays on the host."""
    padded = padded_rows(num_rows, blocks)
    bounds_2P = np.pad(bounds(segments, num_rows), ((0, 0), (0, padded - num_rows)))
    return jax.tree.map(np.asarray, _key_ranges(jnp.asarray(bounds_2P), blocks))


_key_ranges = jax.jit(key_ranges, static_argnums=1)
