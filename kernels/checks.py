"""Static checks shared by the ops: a failure states the invariant and the offending value."""

from typing import Any

import jax
import jax.numpy as jnp

FLOATS = ("float32", "bfloat16")
NUM_LANES = 128  # of a TPU vector register: the width that Mosaic wants of the last dim


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `array` has that shape."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")


def check_rank(name: str, array: jax.Array, rank: int) -> None:
    """Raises ValueError unless `array` has that many dims."""
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}; it must have {rank} dims")


def check_int32(name: str, array: jax.Array) -> None:
    """Raises ValueError unless `array` is int32."""
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} has dtype {array.dtype}; it must be int32")


def check_float(name: str, array: jax.Array) -> None:
    """Raises ValueError unless `array` is float32 or bfloat16.

    float16 is refused: attention logits of real checkpoints leave its range and turn into NaN.
    """
    if array.dtype.name not in FLOATS:
        raise ValueError(f"{name} has dtype {array.dtype}; it must be one of {FLOATS}")


def check_implementation(implementation: str, known: Any) -> None:
    """Raises ValueError unless `implementation` is one of `known`."""
    if implementation not in known:
        raise ValueError(f"implementation is {implementation!r}; it must be one of {tuple(known)}")


def default_implementation(platform: str) -> str:
    """The implementation that serves on a platform: "pallas" on "tpu", "blocked" on "cpu", "gpu".

    Raises:
        ValueError: another platform; the project runs on these three.
    """
    found = {"tpu": "pallas", "cpu": "blocked", "gpu": "blocked"}.get(platform)
    if found is None:
        raise ValueError(f"platform is {platform!r}; it must be 'tpu', 'cpu' or 'gpu'")
    return found


def precision(dtype: Any) -> jax.lax.Precision | None:
    """Of dot products: float32 inputs are multiplied in float32, not in bfloat16 passes."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple
