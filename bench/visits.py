"""Counts how often each named block of a Pallas kernel runs, by running it on the CPU.

While a program is traced, each `jax.named_scope` also plants a host callback where it opens, so the
counts come from what the interpreter executed, not from what the kernel says about itself.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.interpret import COMPILER_OPTIONS


def count(run: Callable[[], Any]) -> Counter[str]:
    """Runs a program whose kernels are interpreted and counts the openings of every named scope.

    Args:
        run: calls the kernels, interpreted, with real data; they must reach `jax.named_scope` by
            that name.
    """
    counts: Counter[str] = Counter()
    with _planted(counts):
        jax.block_until_ready(run())
        jax.effects_barrier()
    return counts


def control_flow(run: Callable[..., Any], *args: Any) -> Callable[..., Counter[str]]:
    """A function that counts as `count` does, for any data of the same shapes.

    Matmuls (`jax.lax.dot_general`) give zeros and copies (`pltpu.make_async_copy`) move nothing:
    much faster, and the same where no trip count depends on them. Without copies the plain
    interpreter will do, which knows no semaphores and is faster still.

    Args:
        run: as for `count`, of `args`.
        args: of the shapes.
    """
    counts: Counter[str] = Counter()
    with (
        _planted(counts),
        mock.patch.object(jax.lax, "dot_general", _no_product),
        mock.patch.object(pltpu, "make_async_copy", return_value=_NoCopy()),
    ):
        lowered = jax.jit(lambda *data: run(*data), compiler_options=COMPILER_OPTIONS).lower(*args)
        compiled = lowered.compile()

    def counted(*data: Any) -> Counter[str]:
        counts.subtract(dict(counts))  # back to zero, but with every name
        jax.block_until_ready(compiled(*data))
        jax.effects_barrier()
        return Counter(counts)

    return counted


@contextlib.contextmanager
def _planted(counts: Counter[str]) -> Iterator[None]:
    named_scope = jax.named_scope

    @contextlib.contextmanager
    def counted(name: str) -> Iterator[None]:
        counts[name] += 0  # a branch that never runs is known, too
        with named_scope(name):
            jax.debug.callback(lambda: counts.update([name]))
            yield

    jax.clear_caches()  # else a program traced before would run without the callbacks
    try:
        with mock.patch.object(jax, "named_scope", counted):
            yield
    finally:
        jax.clear_caches()


_dot_general = jax.lax.dot_general


def _no_product(left: Any, right: Any, dims: Any, **options: Any) -> jax.Array:
    shape = jax.eval_shape(lambda x, y: _dot_general(x, y, dims, **options), left, right)
    return jnp.zeros(shape.shape, shape.dtype)


class _NoCopy:
    """Stands for an asynchronous copy."""

    def start(self) -> None:
        """Starts nothing."""

    def wait(self) -> None:
        """Waits for nothing."""
