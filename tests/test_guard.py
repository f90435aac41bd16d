"""The guard itself: it stops eager and jitted calls and lets executables run."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.guard import DispatchError, only_executables


def test_guard_refuses_what_compiles_and_runs_what_is_compiled() -> None:
    warm = jax.jit(lambda x: x + 1)
    x = jnp.ones(3)
    warm(x)
    compiled = jax.jit(lambda x: x * 2).lower(x).compile()
    with only_executables() as tried:
        np.testing.assert_array_equal(
            np.asarray(compiled(jax.device_put(np.ones(3, np.float32)))), 2
        )
        assert tried == []
        for dispatch in (lambda: warm(x), lambda: x + 1, lambda: jnp.sin(x), lambda: x[0]):
            with pytest.raises(DispatchError):
                dispatch()
        assert len(tried) == 4
    assert float(warm(x)[0]) == 2.0


def test_guard_reaches_other_threads() -> None:
    x = jnp.ones(3)
    failures: list[str] = []

    def work() -> None:
        try:
            jnp.cos(x)
        except DispatchError as error:
            failures.append(str(error))

    with only_executables():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(failures) == 1
