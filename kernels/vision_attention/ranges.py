"""Which keys each block of queries visits: bounds of segments to trip counts, in XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_vl.kernels.vision_attention.blocks import Blocks


class Ranges(NamedTuple):
    """Per block of queries, int32; a range is [first, last), counted in blocks of keys.

    Args:
        first_I, last_I: key blocks that hold a key of the block's segments; none for padding.
        full_first_I, full_last_I: those among them that every patch of the block sees whole; both
            `last_I` where there are none.
        trips_I: of the narrow path; 0: the block takes the wide path.
        group_first_GI: first narrow key block (of `tile` keys) of each group of queries.
        chunk_first_I, chunk_last_I: the chunks that hold the key blocks, both inclusive.
    """

    first_I: jax.Array
    last_I: jax.Array
    full_first_I: jax.Array
    full_last_I: jax.Array
    trips_I: jax.Array
    group_first_GI: jax.Array
    chunk_first_I: jax.Array
    chunk_last_I: jax.Array


def key_ranges(bounds_2P: jax.Array, blocks: Blocks) -> Ranges:
    """The ranges of every block of queries.

    Args:
        bounds_2P: int32 first and one-past-last patch of each patch's segment, both 0 for padding;
            P is a multiple of the blocks' sizes.
        blocks: the block sizes.
    """
    lowest_I, highest_I = _span(bounds_2P, blocks.queries)
    first_I, last_I = lowest_I // blocks.keys, -(-highest_I // blocks.keys)
    full_first_I, full_last_I = _common(bounds_2P, blocks)
    full_last_I = jnp.minimum(full_last_I, last_I)
    none_I = full_first_I >= full_last_I
    group_low, group_high = (
        x.reshape(-1, blocks.queries // blocks.tile).T for x in _span(bounds_2P, blocks.tile)
    )
    group_first_GI = group_low // blocks.tile
    trips_I = (-(-group_high // blocks.tile) - group_first_GI).max(axis=0)
    # The narrow path keeps the matrix units about two thirds as busy as the wide one.
    shorter_I = 3 * trips_I * blocks.tile < 2 * (last_I - first_I) * blocks.keys
    per_chunk = blocks.chunk // blocks.keys
    chunk_first_I = first_I // per_chunk
    return Ranges(
        first_I,
        last_I,
        jnp.where(none_I, last_I, full_first_I),
        jnp.where(none_I, last_I, full_last_I),
        jnp.where(shorter_I, trips_I, 0),
        group_first_GI,
        chunk_first_I,
        jnp.maximum(chunk_first_I, (last_I - 1) // per_chunk),
    )


def _span(bounds_2P: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Lowest start and highest end per run of `size` patches; (0, 0) for padding alone."""
    start_IX, end_IX = bounds_2P.reshape(2, -1, size)
    lowest_I = jnp.where(end_IX > start_IX, start_IX, jnp.iinfo(jnp.int32).max).min(axis=1)
    highest_I = end_IX.max(axis=1)
    return jnp.minimum(lowest_I, highest_I), highest_I


def _common(bounds_2P: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """Key blocks inside the segments of all valid patches of each block of queries."""
    start_IX, end_IX = bounds_2P.reshape(2, -1, blocks.queries)
    end_IX = jnp.where(end_IX > start_IX, end_IX, jnp.iinfo(jnp.int32).max)
    return -(-start_IX.max(axis=1) // blocks.keys), end_IX.min(axis=1) // blocks.keys
