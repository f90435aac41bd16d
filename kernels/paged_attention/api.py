"""Causal attention of a ragged batch over paged K and V, the new tokens' own included."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tpu_vl.kernels import checks, interpret, sharding
from tpu_vl.kernels.paged_attention import pallas_tpu, reference
from tpu_vl.kernels.paged_attention.blocks import Blocks
from tpu_vl.kernels.paged_attention.pages import (
    Batch,
    cache_dtype,
    cache_shape,
    cache_spec,
    num_parts,
    num_shards,
)
from tpu_vl.kernels.paged_attention.rope import Rope, queries_and_keys

__all__ = ["Rope", "cache_dtype", "cache_shape", "cache_spec", "paged_attention", "pick"]


def _plain(attend: Callable[..., tuple[jax.Array, jax.Array]]) -> Any:
    """An implementation that takes ready queries and keys, behind their norm and rotation."""

    def run(
        q_TNH: jax.Array, k_TKH: jax.Array, *others: Any, rope: Rope | None, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        if rope is not None:
            q_TNH, k_TKH = queries_and_keys(q_TNH, k_TKH, rope)
        return attend(q_TNH, k_TKH, *others, **options)

    return run


_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "dense": _plain(reference.dense),
    "blocked": _plain(reference.blocked),
    "pallas": pallas_tpu.ragged,
}
QUANTISED = ("int8", "float8_e4m3fn")

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
    kv_scales_2K: jax.Array | None = None,
    rope: Rope | None = None,
    blocks: Blocks | None = None,
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
            (CPU and GPU: work grows with the tokens' own causal limits) or "pallas" (TPU; on CPU
            interpreted, slowly); see `pick`.
        mesh: with a "model" axis; heads are sharded over it if it divides K, else every device
            computes them all. None: one device.
        kv_scales_2K: float32 steps of a quantised cache (int8 or float8_e4m3fn), of K and of V of
            each head: the pages hold value / step, rounded. None: the pages hold the values.
        rope: norm and rotation that queries and keys still need. None: they are ready.
        blocks: sizes for "pallas" that do not change a result; None: those of blocks.py.

    Returns:
        out_TNH, dtype of `q_TNH`, and the updated pages_LSCH.

    Raises:
        ValueError: a shape, dtype or name breaks the contract; the message names it.
    """
    _check(q_TNH, k_TKH, v_TKH, pages_LSCH, page_table_BM, q_starts_B, kv_lens_B)
    _check_pages(k_TKH, pages_LSCH, kv_scales_2K, mesh)
    if rope is not None:
        _check_rope(q_TNH, rope)
    checks.check_implementation(implementation, _IMPLEMENTATIONS)
    attend = _IMPLEMENTATIONS[implementation]
    if implementation == "pallas":
        attend = partial(attend, target=interpret.target(mesh), blocks=blocks)

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: jax.Array,
        scales: jax.Array | None,
        turn: tuple[jax.Array, ...] | None,
        *addresses: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        batch = Batch(jnp.clip(addresses[0], 0, pages.shape[0] - 1), *addresses[1:])
        own = None if rope is None or turn is None else Rope(*turn, eps=rope.eps)
        return attend(q, k, v, pages, batch, scale=scale, kv_scales_2K=scales, rope=own)

    axis = sharding.heads_axis(k_TKH.shape[1], mesh)
    heads, pages = PartitionSpec(None, axis, None), PartitionSpec(None, None, axis, None)
    whole = PartitionSpec()
    in_specs = (heads, heads, heads, pages, PartitionSpec(None, axis), *[whole] * 4)
    split = sharding.on_mesh(run, mesh, in_specs, (heads, pages))
    addresses = (page_table_BM, q_starts_B, kv_lens_B)
    with jax.named_scope("paged_attention"):
        turn = None if rope is None else rope.arrays()
        return split(q_TNH, k_TKH, v_TKH, pages_LSCH, kv_scales_2K, turn, *addresses)


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
    checks.check_float("q_TNH", q_TNH)
    num_tokens, num_heads, width = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    checks.check_shape("k_TKH", k_TKH, (num_tokens, num_kv_heads, width))
    checks.check_shape("v_TKH", v_TKH, k_TKH.shape)
    for name, array in (("k_TKH", k_TKH), ("v_TKH", v_TKH)):
        if array.dtype != q_TNH.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}; q_TNH has {q_TNH.dtype}: make equal")
    if num_heads % num_kv_heads:
        raise ValueError(f"N={num_heads} query heads are no multiple of K={num_kv_heads} heads")
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


def _check_rope(q_TNH: jax.Array, rope: Rope) -> None:
    num_tokens, _, width = q_TNH.shape
    for name, array in (("q_norm_H", rope.q_norm_H), ("k_norm_H", rope.k_norm_H)):
        checks.check_shape(f"rope.{name}", array, (width,))
    for name, array in (("cos_TH", rope.cos_TH), ("sin_TH", rope.sin_TH)):
        checks.check_shape(f"rope.{name}", array, (num_tokens, width))


def _check_pages(
    k_TKH: jax.Array, pages_LSCH: jax.Array, kv_scales_2K: jax.Array | None, mesh: Mesh | None
) -> None:
    _, num_kv_heads, width = k_TKH.shape
    shards = num_shards(num_kv_heads, mesh)
    needed = 2 * num_kv_heads // shards * num_parts(pages_LSCH, width)
    num_rows = pages_LSCH.shape[2]
    if num_rows % shards or num_rows // shards < needed:
        raise ValueError(
            f"pages_LSCH has shape {pages_LSCH.shape}; with K={num_kv_heads} and H={width} on "
            f"{shards} devices its third dim must hold {needed} rows on each: use cache_shape"
        )
    dtype = pages_LSCH.dtype
    if kv_scales_2K is None:
        if dtype not in (k_TKH.dtype, jnp.float32):
            raise ValueError(
                f"pages_LSCH has dtype {dtype}, k_TKH {k_TKH.dtype}: without kv_scales_2K pages "
                "must have the dtype of k_TKH or float32: use cache_dtype"
            )
        return
    if dtype.name not in QUANTISED:
        raise ValueError(f"pages_LSCH has dtype {dtype}; with kv_scales_2K one of {QUANTISED}")
    checks.check_shape("kv_scales_2K", kv_scales_2K, (2, num_kv_heads))
    if kv_scales_2K.dtype != jnp.float32:
        raise ValueError(f"kv_scales_2K has dtype {kv_scales_2K.dtype}; it must be float32")
