"""Causal attention of a ragged batch over paged K and V, the new tokens' own included."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tpu_vl.kernels import checks, sharding
from tpu_vl.kernels.paged_attention import reference, shipped_tpu
from tpu_vl.kernels.paged_attention.pages import Batch, cache_dtype, cache_shape, cache_spec

__all__ = ["cache_dtype", "cache_shape", "cache_spec", "paged_attention", "pick"]

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "dense": reference.dense,
    "blocked": reference.blocked,
    "pallas": shipped_tpu.ragged,
}

pick = checks.default_implementation


def paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_LSCH: jax.Array,
    page_table_BM: jax.Array,
    q_starts_B: jax.Array,
    kv_lens_B: jax.Array,
    *,
    scale: float,
    implementation: str,
    mesh: Mesh | None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new tokens' K and V into the pages and attends to each sequence's cache.

    New token i of a sequence stands at cache position kv_len - q_len + i and sees the positions up
    to its own; decoding, prefill and chunks of prompts mix freely. Logits, softmax and sums are
    float32. Tokens from `q_starts_B[-1]` on are padding: they may be NaN, write nothing and come
    back as zeros. Slots that no live sequence has filled may hold anything, NaN too.

    Donate `pages_LSCH` to have it updated in place.

    Args:
        q_TNH: float32 or bfloat16 queries; N is a multiple of K.
        k_TKH: keys of the new tokens, dtype of `q_TNH`.
        v_TKH: values of the new tokens, dtype of `q_TNH`.
        pages_LSCH: one layer's cache, see `cache_shape`, `cache_dtype` and `cache_spec`.
        page_table_BM: int32 pages of each sequence, in order; what lies behind the pages that
            its kv_len needs is ignored, whatever its value.
        q_starts_B: int32 [B + 1] cumulative new tokens, from 0. Sequences without new tokens
            come last and repeat the total.
        kv_lens_B: int32 tokens in the cache including the new ones, at most M * S; 0 for
            padding sequences.
        scale: factor of the logits, usually H ** -0.5.
        implementation: "dense" (the truth; materialises all logits, differentiable), "blocked"
            (CPU and GPU: work grows with the tokens' own causal limits) or "pallas" (TPU: the
            ragged paged attention kernel that jax ships); see `pick`.
        mesh: with a "model" axis; heads are sharded over it if it divides K, else every device
            computes them all. None: one device.

    Returns:
        out_TNH, dtype of `q_TNH`, and the updated pages_LSCH.

    Raises:
        ValueError: a shape, dtype or name breaks the contract; the message names it.
    """
    _check(q_TNH, k_TKH, v_TKH, pages_LSCH, page_table_BM, q_starts_B, kv_lens_B)
    checks.check_implementation(implementation, _IMPLEMENTATIONS)

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, *addresses: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        batch = Batch(jnp.clip(addresses[0], 0, pages.shape[0] - 1), *addresses[1:])
        return _IMPLEMENTATIONS[implementation](q, k, v, pages, batch, scale=scale)

    axis = sharding.heads_axis(k_TKH.shape[1], mesh)
    heads, pages = PartitionSpec(None, axis, None), PartitionSpec(None, None, axis, None)
    whole = PartitionSpec()
    split = sharding.on_mesh(
        run, mesh, (heads, heads, heads, pages, whole, whole, whole), (heads, pages)
    )
    with jax.named_scope("paged_attention"):
        return split(q_TNH, k_TKH, v_TKH, pages_LSCH, page_table_BM, q_starts_B, kv_lens_B)


def _check(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_LSCH: jax.Array,
    page_table_BM: jax.Array,
    q_starts_B: jax.Array,
    kv_lens_B: jax.Array,
) -> None:
    for name, array, rank in (("q_TNH", q_TNH, 3), ("k_TKH", k_TKH, 3), ("pages", pages_LSCH, 4)):
        checks.check_rank(name, array, rank)
        checks.check_float(name, array)
    num_tokens, num_heads, width = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    checks.check_shape("k_TKH", k_TKH, (num_tokens, num_kv_heads, width))
    checks.check_shape("v_TKH", v_TKH, k_TKH.shape)
    for name, array in (("k_TKH", k_TKH), ("v_TKH", v_TKH)):
        if array.dtype != q_TNH.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}; q_TNH has {q_TNH.dtype}: make equal")
    if num_heads % num_kv_heads:
        raise ValueError(f"N={num_heads} query heads are no multiple of K={num_kv_heads} heads")
    if pages_LSCH.shape[2] != 2 * num_kv_heads or pages_LSCH.shape[3] < width:
        raise ValueError(
            f"pages_LSCH has shape {pages_LSCH.shape}; with K={num_kv_heads} and H={width} its "
            f"last dims must be {2 * num_kv_heads} and at least {width}: use cache_shape"
        )
    if pages_LSCH.dtype not in (q_TNH.dtype, jnp.float32):
        raise ValueError(
            f"pages_LSCH has dtype {pages_LSCH.dtype}, q_TNH {q_TNH.dtype}: pages must have the "
            "dtype of q_TNH or float32: use cache_dtype"
        )
    checks.check_rank("page_table_BM", page_table_BM, 2)
    num_seqs = page_table_BM.shape[0]
    checks.check_shape("q_starts_B", q_starts_B, (num_seqs + 1,))
    checks.check_shape("kv_lens_B", kv_lens_B, (num_seqs,))
    for name, array in (
        ("page_table_BM", page_table_BM),
        ("q_starts_B", q_starts_B),
        ("kv_lens_B", kv_lens_B),
    ):
        checks.check_int32(name, array)
