"""The norm and rotary embedding of heads: what stands between their products and attention.

Source: transformers 5.24 models/qwen3_vl/modeling_qwen3_vl.py, `Qwen3VLTextAttention.forward` and
`apply_rotary_pos_emb`. Deviation: one rounding at the end instead of one after each operation.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Rope:
    """What turns raw heads into queries and keys.

    Args:
        q_norm_H, k_norm_H: weights of the root-mean-square norm of a head.
        cos_TH, sin_TH: tables of the new tokens; both halves of a head are equal.
        eps: of the norm (static).
    """

    q_norm_H: jax.Array
    k_norm_H: jax.Array
    cos_TH: jax.Array
    sin_TH: jax.Array
    eps: float

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """All but eps, in order."""
        return self.q_norm_H, self.k_norm_H, self.cos_TH, self.sin_TH


def queries_and_keys(q_TNH: jax.Array, k_TKH: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Norms and rotates raw heads in plain XLA; differentiable, float32 inside.

    Args:
        q_TNH, k_TKH: as the products give them.
        rope: norm and tables.

    Returns:
        Both, in their own dtypes.
    """

    def turned(x_TNH: jax.Array, weight_H: jax.Array) -> jax.Array:
        x = x_TNH.astype(jnp.float32)
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(mean + rope.eps) * weight_H.astype(jnp.float32)
        first, second = jnp.split(x, 2, axis=-1)
        cos, sin = (table[:, None].astype(jnp.float32) for table in (rope.cos_TH, rope.sin_TH))
        other = jnp.concatenate([-second, first], axis=-1)
        return (x * cos + other * sin).astype(x_TNH.dtype)

    with jax.named_scope("rope"):
        return turned(q_TNH, rope.q_norm_H), turned(k_TKH, rope.k_norm_H)
