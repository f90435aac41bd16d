"""Counts how often each named block of a Pallas kernel runs, by running it on the CPU."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp


def count(run: Callable[[], Any], *, products: bool = True) -> Counter[str]:
    """Runs a program whose kernels are interpreted and counts the openings of every named scope.

    While it is traced, each `jax.named_scope` also plants a host callback where it opens, so the
    counts come from what the interpreter executed, not from what the kernel says about itself.

    Args:
        run: calls the kernels, interpreted, with real data; they must reach `jax.named_scope` by
            that name.
        products: False leaves out the matmuls that are called as `jax.lax.dot_general` and takes
            zeros for them: much faster, and the same where no trip count depends on them.
    """
    counts: Counter[str] = Counter()
    named_scope = jax.named_scope

    @contextlib.contextmanager
    def counted(name: str) -> Iterator[None]:
        counts[name] += 0  # a branch that never runs is known, too
        with named_scope(name):
            jax.debug.callback(lambda: counts.update([name]))
            yield

    def no_product(left: Any, right: Any, dims: Any, **options: Any) -> jax.Array:
        shape = jax.eval_shape(lambda x, y: dot_general(x, y, dims, **options), left, right)
        return jnp.zeros(shape.shape, shape.dtype)

    dot_general = jax.lax.dot_general
    taken = dot_general if products else no_product
    jax.clear_caches()  # else a program traced before would run without the callbacks
    try:
        with (
            mock.patch.object(jax, "named_scope", counted),
            mock.patch.object(jax.lax, "dot_general", taken),
        ):
            jax.block_until_ready(run())
            jax.effects_barrier()
    finally:
        jax.clear_caches()
    return counts
