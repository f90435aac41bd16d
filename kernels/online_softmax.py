"""The softmax of a row whose logits come block by block: what both blocked attentions share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a row without a key gives no NaN


class State(NamedTuple):
    """Rows so far, float32: the largest logit, the sum of weights, the weighted sum of values."""

    top_XR: jax.Array
    total_XR: jax.Array
    sum_XRH: jax.Array


def start(shape_XRH: tuple[int, ...]) -> State:
    """Rows that have seen no key, of any leading dims X."""
    return State(
        jnp.full(shape_XRH[:-1], MASKED, jnp.float32),
        jnp.zeros(shape_XRH[:-1], jnp.float32),
        jnp.zeros(shape_XRH, jnp.float32),
    )


def update(
    state: State,
    logits_XRK: jax.Array,
    seen_XRK: jax.Array,
    v_XKH: jax.Array,
    precision: jax.lax.Precision | None,
) -> State:
    """Takes in one block of K keys.

    Args:
        state: rows so far.
        logits_XRK: float32; unseen ones may be anything.
        seen_XRK: bool, broadcast against the logits: which keys a row sees.
        v_XKH: values; those of keys that nobody sees must be finite.
        precision: of the product.

    Returns:
        The rows with the block; `sum_XRH / total_XR` is their attention.
    """
    logits_XRK = jnp.where(seen_XRK, logits_XRK, MASKED)
    top_XR = jnp.maximum(state.top_XR, logits_XRK.max(axis=-1))
    weights_XRK = jnp.where(seen_XRK, jnp.exp(logits_XRK - top_XR[..., None]), 0)
    decay_XR = jnp.exp(state.top_XR - top_XR)
    part_XRH = jnp.einsum(
        "...rk,...kh->...rh",
        weights_XRK.astype(v_XKH.dtype),
        v_XKH,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    total_XR = state.total_XR * decay_XR + weights_XRK.sum(axis=-1)
    return State(top_XR, total_XR, state.sum_XRH * decay_XR[..., None] + part_XRH)
