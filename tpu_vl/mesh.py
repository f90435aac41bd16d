"""The one place that makes device meshes: axes ("data", "model"), all Auto."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu_vl.errors import ConfigError

DATA = "data"
MODEL = "model"


def make_mesh(tensor_parallel_size: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `tensor_parallel_size` devices over "model" and one over "data".

    Args:
        tensor_parallel_size: devices on the "model" axis, >= 1.
        devices: taken in this order; None: `jax.devices()`.

    Raises:
        ConfigError: fewer devices than asked for; lower `--tensor-parallel-size`.
    """
    found = list(jax.devices() if devices is None else devices)
    if not 1 <= tensor_parallel_size <= len(found):
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel_size} needs as many devices, but there are "
            f"{len(found)} ({found[0].platform}); use a value from 1 to {len(found)}"
        )
    grid = np.asarray(found[:tensor_parallel_size], dtype=object).reshape(1, tensor_parallel_size)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def model_size(mesh: Mesh) -> int:
    """Devices on the "model" axis: the tensor-parallel size."""
    return mesh.shape[MODEL]


def platform(mesh: Mesh) -> str:
    """ "tpu", "cpu" or "gpu": what the mesh's devices are."""
    return mesh.devices.flat[0].platform
