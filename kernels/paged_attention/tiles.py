"""Tiles: the new tokens of a ragged batch cut into runs, what every fast implementation visits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_vl.kernels.paged_attention.pages import Batch, owner


class Tiles(NamedTuple):
    """Runs of neighbouring new tokens of one sequence, the live ones first.

    Args:
        seq_I: int32 sequence of each tile.
        row_I: int32 its first token.
        num_rows_I: int32 its tokens, at most the tile size; 0 for a dead tile.
        position_I: int32 cache position of its first token.
        num_live: int32 scalar.
    """

    seq_I: jax.Array
    row_I: jax.Array
    num_rows_I: jax.Array
    position_I: jax.Array
    num_live: jax.Array

    @property
    def limit_I(self) -> jax.Array:
        """Cached tokens that each tile's last row sees: its causal limit."""
        return jnp.where(self.num_rows_I > 0, self.position_I + self.num_rows_I, 0)


def make_tiles(batch: Batch, q_lens_B: jax.Array, tile: int, num_tiles: int) -> Tiles:
    """Cuts the first `q_lens_B` new tokens of each sequence into tiles of at most `tile`."""
    count_B = (q_lens_B + tile - 1) // tile
    end_B = jnp.cumsum(count_B)
    tile_I = jnp.arange(num_tiles)
    seq_I = owner(end_B, tile_I)
    offset_I = (tile_I - (end_B - count_B)[seq_I]) * tile
    start_B = batch.q_starts_B[:-1]
    return Tiles(
        seq_I=seq_I,
        row_I=start_B[seq_I] + offset_I,
        num_rows_I=jnp.clip(q_lens_B[seq_I] - offset_I, 0, tile),
        position_I=(batch.kv_lens_B - batch.q_lens_B)[seq_I] + offset_I,
        num_live=end_B[-1],
    )
