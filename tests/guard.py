"""Makes every jax dispatch outside compiled executables raise: what no request may reach."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from jax._src import core, pjit

# Placing a numpy array on the devices compiles nothing; it is how inputs reach an executable.
_ALLOWED = ("device_put",)


class DispatchError(AssertionError):
    """Something traced, jitted or ran a primitive eagerly."""


@contextmanager
def only_executables() -> Iterator[list[str]]:
    """Inside, an eager primitive or a jitted call raises, in every thread; yields what was tried.

    Caches are cleared first, so that a function compiled before cannot slip through jit's fast
    path; compiled executables are no part of those caches.
    """
    tried: list[str] = []
    process = core.EvalTrace.process_primitive

    def refuse(name: str) -> None:
        tried.append(name)
        raise DispatchError(f"dispatched outside the table of executables: {name}")

    def eager(self: Any, primitive: Any, args: Any, params: Any) -> Any:
        if primitive.name in _ALLOWED:
            return process(self, primitive, args, params)
        return refuse(primitive.name)

    def jitted(*call: Any) -> None:
        refuse(f"jit of {getattr(call[2], '__name__', call[2])}")

    jax.clear_caches()
    with (
        mock.patch.object(core.EvalTrace, "process_primitive", eager),
        mock.patch.object(pjit, "_run_python_pjit", jitted),
    ):
        yield tried
