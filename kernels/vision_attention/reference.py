"""Vision attention in plain XLA: `dense`, the truth, and `blocked`, which serves on CPU and GPU."""

import jax
import jax.numpy as jnp
from jax import lax

from tpu_vl.kernels import online_softmax
from tpu_vl.kernels.checks import precision

BLOCK = 256  # patches; on CPU 512 is faster for one large frame, 64 or 128 for many small ones


def dense(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    bounds_2P: jax.Array,
    num_patches: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """All logits at once, in float32, masked where the segments differ."""
    valid_P = jnp.arange(q_PNH.shape[0]) < num_patches
    q, k, v = (
        jnp.where(valid_P[:, None, None], x, 0).astype(jnp.float32) for x in (q_PNH, k_PNH, v_PNH)
    )
    logits_NPQ = scale * jnp.einsum("pnh,qnh->npq", q, k, precision=lax.Precision.HIGHEST)
    same_PQ = (bounds_2P[0][:, None] == bounds_2P[0][None]) & valid_P[:, None] & valid_P[None]
    weights_NPQ = jax.nn.softmax(jnp.where(same_PQ, logits_NPQ, online_softmax.MASKED), axis=-1)
    out_PNH = jnp.einsum("npq,qnh->pnh", weights_NPQ, v, precision=lax.Precision.HIGHEST)
    return jnp.where(valid_P[:, None, None], out_PNH, 0).astype(q_PNH.dtype)


def key_blocks(
    bounds_2P: jax.Array, num_patches: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """The key blocks that each block of queries visits: first and one-past-last, each [P / block].

    They reach from the first key of the block's first segment to the last key of its last one; a
    block of padding visits none.

    Args:
        bounds_2P: int32, as in `vision_attention`; P is a multiple of `block`.
        num_patches: int32 scalar.
        block: patches per block.
    """
    valid_P = jnp.arange(bounds_2P.shape[1]) < num_patches
    start_I = bounds_2P[0, ::block] // block
    last_I = jnp.where(valid_P, bounds_2P[1], 0).reshape(-1, block).max(axis=1)
    end_I = (last_I + block - 1) // block
    return jnp.minimum(start_I, end_I), end_I


def blocked(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    bounds_2P: jax.Array,
    num_patches: jax.Array,
    *,
    scale: float,
    block: int = BLOCK,
) -> jax.Array:
    """Online softmax of each block of queries over the key blocks that its segments overlap."""
    num_rows, num_heads, width = q_PNH.shape
    block = min(block, num_rows)
    pad = -num_rows % block
    exact = precision(q_PNH.dtype)
    q_NPH, k_NPH, v_NPH = (
        jnp.pad(jnp.swapaxes(x, 0, 1), ((0, 0), (0, pad), (0, 0))) for x in (q_PNH, k_PNH, v_PNH)
    )
    bounds_2P = jnp.pad(bounds_2P, ((0, 0), (0, pad)))
    start_I, end_I = key_blocks(bounds_2P, num_patches, block)
    offset_X = jnp.arange(block)

    def rows(x: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * block, block, axis)

    def query_block(i: jax.Array, out_NPH: jax.Array) -> jax.Array:
        q_NXH, bounds_2X = rows(q_NPH, i, 1), rows(bounds_2P, i, 1)

        def key_block(j: jax.Array, state: online_softmax.State) -> online_softmax.State:
            key_Y = j * block + offset_X
            v_NYH = jnp.where((key_Y < num_patches)[:, None], rows(v_NPH, j, 1), 0)
            logits_NXY = scale * jnp.einsum(
                "nxh,nyh->nxy",
                q_NXH,
                rows(k_NPH, j, 1),
                precision=exact,
                preferred_element_type=jnp.float32,
            )
            seen_XY = (key_Y >= bounds_2X[0][:, None]) & (key_Y < bounds_2X[1][:, None])
            return online_softmax.update(state, logits_NXY, seen_XY, v_NYH, exact)

        start = online_softmax.start((num_heads, block, width))
        _, total_NX, sum_NXH = lax.fori_loop(start_I[i], end_I[i], key_block, start)
        valid_X = i * block + offset_X < num_patches
        found_NXH = jnp.where(valid_X[:, None], sum_NXH / total_NX[..., None], 0)
        return lax.dynamic_update_slice_in_dim(
            out_NPH, found_NXH.astype(out_NPH.dtype), i * block, axis=1
        )

    num_blocks = (num_patches + block - 1) // block
    out_NPH = lax.fori_loop(0, num_blocks, query_block, jnp.zeros_like(q_NPH))
    return jnp.swapaxes(out_NPH, 0, 1)[:num_rows]
