"""K and V of one head, out of a key block in VMEM.

Heads are unrolled everywhere: a strided access cannot start at a row that is data.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpu_vl.kernels.checks import precision
from tpu_vl.kernels.paged_attention import words
from tpu_vl.kernels.paged_attention.plan import Plan


def load_head(plan: Plan, kv_ref: Any, head: int, row: int) -> jax.Array:
    """K (row 0) or V (row 1) of a head of a key block, [X, H] in the dtype of the queries.

    Args:
        plan: sizes.
        kv_ref: the block's rows [X, C, 128].
        head: which.
        row: 0 or 1.
    """
    packing = words.packing(plan.cache_dtype)
    parts = []
    for part in range(plan.num_parts):
        at = 2 * (head * plan.num_parts + part) + row
        found = words.load(kv_ref, at // packing, interpreted=plan.interpreted)
        parts.append(words.unpack(found, at % packing, plan.cache_dtype, plan.dtype))
    return jnp.concatenate(parts, axis=1)


def dot(plan: Plan, a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    """Product over the last dim of `a` and dim `contracted` of `b`, float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (contracted,)), ((), ())),
        precision=precision(plan.dtype),
        preferred_element_type=jnp.float32,
    )
