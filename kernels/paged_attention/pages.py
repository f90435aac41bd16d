"""KV pages: their shape, the batch that addresses them, and the write of new tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tpu_vl.kernels import sharding
from tpu_vl.kernels.checks import NUM_LANES, round_up


class Batch(NamedTuple):
    """A ragged batch's addresses, made safe to index with.

    Args:
        page_table_BM: int32 pages of each sequence in order, every entry in [0, L).
        q_starts_B: int32 [B + 1] cumulative new tokens.
        kv_lens_B: int32 tokens in the cache, the new ones included.
    """

    page_table_BM: jax.Array
    q_starts_B: jax.Array
    kv_lens_B: jax.Array

    @property
    def q_lens_B(self) -> jax.Array:
        """New tokens of each sequence."""
        return self.q_starts_B[1:] - self.q_starts_B[:-1]


def cache_shape(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    implementation: str = "blocked",
) -> tuple[int, int, int, int]:
    """The shape of one layer's pages: [page, slot, C, H], C = 2K.

    K and V of a head are neighbours (k0, v0, k1, v1, ...), so that a shard of C holds whole heads
    and a pair of bfloat16 values shares a 32-bit word.

    Args:
        num_pages: L, >= 1.
        page_size: S, tokens per page, >= 1.
        num_kv_heads: K of the whole model (not of one device).
        head_dim: H.
        implementation: for "pallas" H is padded to a multiple of 128 lanes; the padding is never
            read into a result.
    """
    width = round_up(head_dim, NUM_LANES) if implementation == "pallas" else head_dim
    return (num_pages, page_size, 2 * num_kv_heads, width)


def cache_dtype(dtype: str, platform: str) -> Any:
    """The dtype of the pages of a model computed in `dtype`: that dtype, but float32 on CPU.

    XLA:CPU scatters to bfloat16 by way of a float32 copy of the whole operand, so that writing a
    token would cost a pass over all pages. The values are the same: bfloat16 is widened exactly.

    Args:
        dtype: "float32" or "bfloat16".
        platform: "tpu", "cpu" or "gpu".
    """
    return jnp.dtype("float32" if platform == "cpu" else dtype)


def cache_spec(num_kv_heads: int, mesh: Mesh) -> PartitionSpec:
    """How pages are placed: C over "model" if it divides K, else whole on every device."""
    return PartitionSpec(None, None, sharding.heads_axis(num_kv_heads, mesh), None)


def owner(end_B: jax.Array, item_I: jax.Array) -> jax.Array:
    """Which of consecutive runs that end at `end_B` each item lies in; past them all, the last.

    Compared all with all: few enough, and compiled four times faster than a binary search.
    """
    return jnp.minimum((end_B[None] <= item_I[:, None]).sum(axis=1), len(end_B) - 1)


def token_rows(batch: Batch, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sequence and cache position of each new token, and whether it is one (not padding)."""
    token_T = jnp.arange(num_tokens)
    seq_T = owner(batch.q_starts_B[1:], token_T)
    past_B = batch.kv_lens_B - batch.q_lens_B
    position_T = past_B[seq_T] + token_T - batch.q_starts_B[seq_T]
    return seq_T, position_T, token_T < batch.q_starts_B[-1]


def write_pages(
    pages_LSCH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, batch: Batch
) -> jax.Array:
    """Scatters the new tokens' K and V into their slots; padding tokens write nowhere."""
    num_pages, page_size, num_rows, page_width = pages_LSCH.shape
    num_tokens, num_kv_heads, width = k_TKH.shape
    seq_T, position_T, valid_T = token_rows(batch, num_tokens)
    page_T = batch.page_table_BM[seq_T, position_T // page_size]
    page_T = jnp.where(valid_T, page_T, num_pages)
    kv_TCH = jnp.stack([k_TKH, v_TKH], axis=2).reshape(num_tokens, 2 * num_kv_heads, width)
    kv_TCH = jnp.pad(kv_TCH, ((0, 0), (0, num_rows - 2 * num_kv_heads), (0, page_width - width)))
    kv_TCH = kv_TCH.astype(pages_LSCH.dtype)
    return pages_LSCH.at[page_T, position_T % page_size].set(kv_TCH, mode="drop")


def gather_heads(
    pages_LSCH: jax.Array, page_IM: jax.Array, num_kv_heads: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """K and V of some pages, heads outermost: two arrays [I, K, M * S, H].

    The head index is part of the gather: a transpose after it costs twice as much on CPU.
    """

    def gather(offset: int) -> jax.Array:
        row_K = 2 * jnp.arange(num_kv_heads) + offset
        found = pages_LSCH.at[page_IM[:, None], :, row_K[None, :, None], :width]
        found_IKMSH = found.get(mode="promise_in_bounds")
        return found_IKMSH.reshape(page_IM.shape[0], num_kv_heads, -1, width)

    return gather(0), gather(1)
