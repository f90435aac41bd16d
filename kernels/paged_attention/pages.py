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


def num_shards(num_kv_heads: int, mesh: Mesh | None) -> int:
    """Devices over which K heads are spread: the size of "model" if it divides K, else 1."""
    axis = sharding.heads_axis(num_kv_heads, mesh)
    return 1 if mesh is None or axis is None else mesh.shape[axis]


def cache_shape(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    implementation: str = "blocked",
    *,
    dtype: Any = "bfloat16",
    mesh: Mesh | None = None,
) -> tuple[int, int, int, int]:
    """The shape of one layer's pages: [page, slot, C, H], C = 2K where nothing is padded.

    K and V of a head are neighbours (k0, v0, k1, v1, ...), so that a shard of C holds whole heads
    and the two share a 32-bit word in bfloat16.

    Args:
        num_pages: L, >= 1.
        page_size: S, tokens per page, >= 1.
        num_kv_heads: K of the whole model (not of one device).
        head_dim: H.
        implementation: for "pallas" rows are 128 wide: a narrower head is padded to it, a wider one
            takes several pairs of rows (k0 lanes 0-127, v0 lanes 0-127, k0 lanes 128-255, ...), and
            each device's rows are padded to what tiles without gaps: whole 32-bit words, and a
            power of two or a multiple of 8. The padding is never read into a result.
        dtype: of the pages; 8-bit ones pack four rows in a word.
        mesh: over which `cache_spec` spreads C; None: one device.
    """
    if implementation != "pallas":
        return (num_pages, page_size, 2 * num_kv_heads, head_dim)
    shards = num_shards(num_kv_heads, mesh)
    rows = 2 * num_kv_heads // shards * -(-head_dim // NUM_LANES)
    padded = 4 // jnp.dtype(dtype).itemsize
    while padded < min(rows, 8):
        padded *= 2
    return (num_pages, page_size, shards * round_up(rows, padded), NUM_LANES)


def num_parts(pages_LSCH: jax.Array, width: int) -> int:
    """Pairs of rows that a head of `width` takes in these pages."""
    return -(-width // pages_LSCH.shape[3])


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


def new_rows(
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_LSCH: jax.Array,
    kv_scales_2K: jax.Array | None,
) -> jax.Array:
    """The new tokens as they stand in the pages: [T, C, lanes], in the pages' dtype.

    Quantised: divided by the scale, rounded to the nearest even step, clipped to the dtype's range.
    """
    _, _, num_rows, lanes = pages_LSCH.shape
    num_tokens, num_heads, width = k_TKH.shape
    parts = num_parts(pages_LSCH, width)
    kv = jnp.stack([k_TKH, v_TKH], axis=2)
    if kv_scales_2K is not None:
        kv = _quantised(kv.astype(jnp.float32) / kv_scales_2K.T[:, :, None], pages_LSCH.dtype)
    kv = jnp.pad(kv, ((0, 0), (0, 0), (0, 0), (0, parts * lanes - width)))
    kv = jnp.swapaxes(kv.reshape(num_tokens, num_heads, 2, parts, lanes), 2, 3)
    rows = kv.reshape(num_tokens, 2 * num_heads * parts, lanes)
    rows = jnp.pad(rows, ((0, 0), (0, num_rows - rows.shape[1]), (0, 0)))
    return rows.astype(pages_LSCH.dtype)


def _quantised(values: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(values), -info.max, info.max)
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(values, -top, top)


def write_pages(
    pages_LSCH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    batch: Batch,
    kv_scales_2K: jax.Array | None,
) -> jax.Array:
    """Scatters the new tokens' K and V into their slots; padding tokens write nowhere."""
    num_pages, page_size = pages_LSCH.shape[:2]
    seq_T, position_T, valid_T = token_rows(batch, len(k_TKH))
    page_T = batch.page_table_BM[seq_T, position_T // page_size]
    page_T = jnp.where(valid_T, page_T, num_pages)
    rows_TCH = new_rows(k_TKH, v_TKH, pages_LSCH, kv_scales_2K)
    return pages_LSCH.at[page_T, position_T % page_size].set(rows_TCH, mode="drop")


def gather_heads(
    pages_LSCH: jax.Array,
    page_IM: jax.Array,
    num_kv_heads: int,
    width: int,
    kv_scales_2K: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """K and V of some pages, heads outermost: two arrays [I, K, M * S, H].

    The head index is part of the gather: a transpose after it costs twice as much on CPU. Values of
    quantised pages come back multiplied by their scales, float32; others as they are.
    """
    parts = num_parts(pages_LSCH, width)

    def gather(offset: int) -> jax.Array:
        found = [gather_part(offset, part) for part in range(parts)]
        found_IKXH = found[0] if parts == 1 else jnp.concatenate(found, axis=-1)[..., :width]
        if kv_scales_2K is None:
            return found_IKXH
        return found_IKXH.astype(jnp.float32) * kv_scales_2K[offset][:, None, None]

    def gather_part(offset: int, part: int) -> jax.Array:
        row_K = 2 * (parts * jnp.arange(num_kv_heads) + part) + offset
        lanes = min(width, pages_LSCH.shape[3])
        found = pages_LSCH.at[page_IM[:, None], :, row_K[None, :, None], :lanes]
        found_IKMSH = found.get(mode="promise_in_bounds")
        return found_IKMSH.reshape(page_IM.shape[0], num_kv_heads, -1, lanes)

    return gather(0), gather(1)
