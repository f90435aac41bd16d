"""What the families share bit for bit: norms, activations, rotary embeddings, plain attention.

All functions are pure and differentiable; sums and norms run in float32 whatever the dtype.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_vl.kernels.paged_attention.rope import Rope, queries_and_keys


def matmul_precision(dtype: Any) -> AbstractContextManager[Any]:
    """The context in which products of that dtype lose nothing: HIGHEST for float32."""
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return nullcontext()


def rms_norm(x_XD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dim, any leading dims.

    Source: transformers 5.24 `Qwen3VLTextRMSNorm` (the weight multiplies the rounded value).
    """
    x32 = x_XD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight_D * (x32 * scale).astype(x_XD.dtype)


def norm_factors(x_TD: jax.Array, weight_D: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """`rms_norm` in two factors, y_TD and scale_T: the norm is their product, row by row.

    A product of matrices takes `y_TD` and scales its rows at the end (`scaled_einsum`). So nothing
    that precedes the product waits for the sum of squares, and no pass over the rows is spent on
    it. The sum is itself a product with a constant: it comes out of the matrix units.
    """
    width, x32 = x_TD.shape[1], x_TD.astype(jnp.float32)
    # Squares of bfloat16 have 16 bits, which HIGH keeps.
    precision = "highest" if x_TD.dtype == jnp.float32 else "high"
    mean_8D = jnp.full((8, width), 1 / width, jnp.float32)
    with jax.named_scope("norm"):
        mean_8T = jnp.einsum("sd,td->st", mean_8D, x32 * x32, precision=precision)
        return x_TD * weight_D, jax.lax.rsqrt(mean_8T[0] + eps)


def scaled_einsum(spec: str, x_TD: jax.Array, weight: jax.Array, scale_T: jax.Array) -> jax.Array:
    """A product whose rows (the first dim of the result) are scaled before they are rounded.

    Args:
        spec: of `jnp.einsum`.
        x_TD, weight: its operands.
        scale_T: float32.

    Returns:
        The product in the dtype of `x_TD`.
    """
    out = jnp.einsum(spec, x_TD, weight, preferred_element_type=jnp.float32)
    return (out * scale_T.reshape(-1, *[1] * (out.ndim - 1))).astype(x_TD.dtype)


def layer_norm(x_XD: jax.Array, weight_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    """Layer norm over the last dim, any leading dims.

    Source: torch `nn.LayerNorm`.
    """
    x32 = x_XD.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    out = centred * scale * weight_D.astype(jnp.float32) + bias_D.astype(jnp.float32)
    return out.astype(x_XD.dtype)


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x), rounded once; by tanh, which is one operation of TPUs where exp takes two."""
    x32 = x.astype(jnp.float32)
    return (x32 * (0.5 * jnp.tanh(0.5 * x32) + 0.5)).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """HF's `gelu_pytorch_tanh`, rounded once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """The exact (erf) GELU, rounded once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def gated_mlp(
    x_TD: jax.Array,
    scale_T: jax.Array,
    gate_DF: jax.Array,
    up_DF: jax.Array,
    down_FD: jax.Array,
) -> jax.Array:
    """down(silu(gate(x)) * up(x)) for x = scale_T * x_TD, row by row."""
    barrier = jax.lax.optimization_barrier
    up_TF = barrier(scaled_einsum("td,df->tf", x_TD, up_DF, scale_T))
    gate_TF = silu(scaled_einsum("td,df->tf", x_TD, gate_DF, scale_T))
    return jnp.einsum("tf,fd->td", barrier(gate_TF * up_TF), down_FD)


def inverse_frequencies(width: int, theta: float) -> np.ndarray:
    """theta ** -(2 i / width) for i in [0, width / 2), float32.

    Args:
        width: values that the frequencies rotate in pairs; even.
        theta: base wavelength.
    """
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)


def interleaved_axes(num_frequencies: int, sections: Sequence[int]) -> np.ndarray:
    """Which position axis (0 time, 1 row, 2 column) drives each frequency: t h w t h w ... t t.

    Args:
        num_frequencies: half of the head width.
        sections: frequencies of time, rows and columns.

    Source: transformers 5.24 `Qwen3VLTextRotaryEmbedding.recomposition_frequencies`.
    """
    axes = np.zeros(num_frequencies, dtype=np.int32)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


def rope_tables(
    positions_XT: jax.Array, inv_freq: np.ndarray, axes: np.ndarray, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [T, H] of the text rotary embedding.

    Args:
        positions_XT: int32; X = 3 (time, row, column), or 1: plain positions.
        inv_freq: float32 [H / 2].
        axes: int32 [H / 2], from `interleaved_axes`; unused when X = 1.
        dtype: of the tables, as HF casts them to the hidden dtype.
    """
    chosen = axes if positions_XT.shape[0] == 3 else np.zeros_like(axes)
    angles = positions_XT.astype(jnp.float32)[chosen].T * inv_freq
    cos, sin = (table.astype(dtype) for table in cosines_and_sines(angles))
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, sin], axis=-1)


def cosines_and_sines(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, in one pass that reduces each angle once: within 2 ** -23 for angles up to 2 ** 20.

    TPUs spend four times the cycles on `jnp.cos` and `jnp.sin`, which are made for any angle.

    Args:
        angles: float32, in radians.

    Source: Cephes single/sinf.c: the polynomials, and pi / 2 in three parts (Cody and Waite).
    """
    turns = jnp.round(angles * np.float32(2 / np.pi))
    x = angles
    for part in (1.5703125, 4.837512969970703e-4, 7.549789948768648e-8):
        x = x - turns * np.float32(part)
    y = x * x
    sin = _polynomial(y, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1) * y * x + x
    cos = _polynomial(y, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
    cos = cos * y * y - 0.5 * y + 1
    quarter = turns.astype(jnp.int32)
    odd = quarter & 1 == 1
    first, second = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    return (
        jnp.where((quarter + 1) & 2 == 2, -first, first),
        jnp.where(quarter & 2 == 2, -second, second),
    )


def _polynomial(x: jax.Array, *coefficients: float) -> jax.Array:
    """Highest power first."""
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def vision_rope_tables(coords_2P: jax.Array, inv_freq: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [P, H] of the tower's rotary embedding over rows and columns, float32.

    Args:
        coords_2P: int32 row and column of each patch.
        inv_freq: float32 [H / 4].

    Source: transformers 5.24 `Qwen3VLVisionRotaryEmbedding`.
    """
    angles = coords_2P.astype(jnp.float32)[:, :, None] * inv_freq
    angles_PH = jnp.concatenate([angles[0], angles[1], angles[0], angles[1]], axis=-1)
    return jnp.cos(angles_PH), jnp.sin(angles_PH)


def rotate(x_TNH: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    """Rotates the two halves of each head, in the dtype of the tables; returns the dtype of x.

    The halves change places by a product with a signed permutation, which is exact: lanes that
    are sliced, negated and joined take TPUs three passes.
    """
    width = x_TNH.shape[-1]
    turn_HH = np.zeros((width, width), np.float32)
    lane = np.arange(width // 2)
    turn_HH[lane + width // 2, lane], turn_HH[lane, lane + width // 2] = -1, 1
    with matmul_precision(x_TNH.dtype), jax.named_scope("rotate"):
        turned = jnp.matmul(x_TNH, turn_HH.astype(x_TNH.dtype)).astype(cos_TH.dtype)
        x = x_TNH.astype(cos_TH.dtype)
        return (x * cos_TH[:, None] + turned * sin_TH[:, None]).astype(x_TNH.dtype)


def masked_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    rope: Rope,
    seen_TT: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Dense attention by a mask: for training, where nothing is cached.

    Args:
        q_TNH, k_TKH, v_TKH: N is a multiple of K.
        rope: norm and rotation that queries and keys still need.
        seen_TT: bool, whether a token (first axis) sees another one; each sees one at least.
        scale: of the scores.
    """
    q_TNH, k_TKH = queries_and_keys(q_TNH, k_TKH, rope)
    num_tokens, num_heads, width = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    q_TKGH = q_TNH.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, width)
    scores = jnp.einsum("tkgh,skh->kgts", q_TKGH, k_TKH, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen_TT, scores * scale, -jnp.inf), axis=-1)
    out = jnp.einsum("kgts,skh->tkgh", weights.astype(v_TKH.dtype), v_TKH)
    return out.reshape(num_tokens, num_heads, width)
