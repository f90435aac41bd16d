"""Vision attention on TPUs by jax's own flash attention kernel with segment ids."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as kernel

from tpu_vl.kernels.checks import NUM_LANES, round_up

BLOCKS = (512, 256, 128)  # patches per block of queries and of keys, largest first


def flash(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    bounds_2P: jax.Array,
    num_patches: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Pads rows to a block and heads to whole lanes, then runs the shipped kernel.

    The kernel masks by segment but visits every pair of blocks: its time grows with P^2.
    """
    num_rows, _, width = q_PNH.shape
    padded_rows, padded_width = round_up(num_rows, BLOCKS[-1]), round_up(width, NUM_LANES)
    block = next(b for b in BLOCKS if padded_rows % b == 0)
    valid_P = jnp.arange(num_rows) < num_patches

    def prepare(x_PNH: jax.Array) -> jax.Array:
        # Zeroed, since a masked weight of 0 times a NaN value is NaN.
        x_NPH = jnp.swapaxes(jnp.where(valid_P[:, None, None], x_PNH, 0), 0, 1)
        return jnp.pad(x_NPH, ((0, 0), (0, padded_rows - num_rows), (0, padded_width - width)))[
            None
        ]

    segment_P = jnp.pad(
        jnp.where(valid_P, bounds_2P[0], -1), (0, padded_rows - num_rows), constant_values=-1
    )[None]
    with jax.default_matmul_precision("highest" if q_PNH.dtype == jnp.float32 else "default"):
        out_NPH = kernel.flash_attention(
            prepare(q_PNH),
            prepare(k_PNH),
            prepare(v_PNH),
            segment_ids=kernel.SegmentIds(q=segment_P, kv=segment_P),
            sm_scale=scale,
            block_sizes=kernel.BlockSizes(
                block_q=block, block_k_major=block, block_k=block, block_b=1
            ),
        )[0, :, :num_rows, :width]
    return jnp.where(valid_P[:, None, None], jnp.swapaxes(out_NPH, 0, 1), 0)
