"""AdamW with clipped gradients and a trapezoid schedule, for the bundled model."""

from typing import Any

import jax
import jax.numpy as jnp

from tpu_vl.tree import pytree

BETA1 = 0.9
BETA2 = 0.98
EPSILON = 1e-8
WEIGHT_DECAY = 0.02
CLIP_NORM = 1.0
WARMUP_STEPS = 200
DECAY_SHARE = 0.25


@pytree
class AdamState:
    """What the optimizer remembers: steps done and both moments, as trees like the params."""

    step: jax.Array
    mean: Any
    square: Any


def start(params: Any) -> AdamState:
    """The state before the first step."""
    return AdamState(
        step=jnp.zeros((), jnp.int32),
        mean=jax.tree.map(jnp.zeros_like, params),
        square=jax.tree.map(jnp.zeros_like, params),
    )


def learning_rate(step: jax.Array, peak: float, num_steps: int) -> jax.Array:
    """Linear warm-up, the peak, then linear decay to zero over the last `DECAY_SHARE` of steps."""
    warm = jnp.minimum(1.0, (step + 1) / WARMUP_STEPS)
    left = (num_steps - step) / (DECAY_SHARE * num_steps)
    return peak * warm * jnp.clip(left, 0.0, 1.0)


def update(
    params: Any, gradients: Any, state: AdamState, *, peak: float, num_steps: int
) -> tuple[Any, AdamState]:
    """One step; weight decay is decoupled and spares norms and biases (arrays of few dims).

    Args:
        params, gradients: equal trees of float32.
        state: from `start` or the step before.
        peak: highest learning rate.
        num_steps: length of the schedule.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, CLIP_NORM / (norm + EPSILON))
    step = state.step + 1
    rate = learning_rate(state.step, peak, num_steps)
    mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * scale * g, state.mean, gradients)
    square = jax.tree.map(
        lambda s, g: BETA2 * s + (1 - BETA2) * jnp.square(scale * g), state.square, gradients
    )

    def moved(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        direction = (m / (1 - BETA1**step)) / (jnp.sqrt(s / (1 - BETA2**step)) + EPSILON)
        decay = WEIGHT_DECAY * p if p.ndim > 1 else 0.0
        return p - rate * (direction + decay)

    params = jax.tree.map(moved, params, mean, square)
    return params, AdamState(step=step, mean=mean, square=square)
