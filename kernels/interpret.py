"""Where a Pallas TPU kernel runs: compiled for the mesh's TPU, or interpreted on a CPU.

"pallas" is one implementation name. On CPUs it runs in JAX's TPU interpret mode, which simulates
VMEM, DMAs and semaphores: slow, for tests; the platform's default there is "blocked" (see
`checks.default_implementation`). Uninitialised memory reads as NaN. A mesh of described, absent
TPUs (`jax.experimental.topologies`) counts as TPUs: the kernel is compiled for them.

`pltpu.force_tpu_interpret_mode(params)` overrides the parameters, e.g. to detect races.
"""

from dataclasses import dataclass

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from tpu_vl.kernels.chips import CHIPS, Chip, chip_of

INTERPRETED = CHIPS["v6e"]  # the chip whose sizes a kernel takes where it is interpreted
# For `jax.jit` of a kernel that is interpreted a few times: its program is large, and XLA would
# spend more on making it fast than it ever runs.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Target:
    """What a kernel is built for; hashable.

    Args:
        chip: its sizes bound the blocks.
        interpret: the `interpret` argument of `pallas_call`.
    """

    chip: Chip
    interpret: pltpu.InterpretParams | bool


def target(mesh: Mesh | None) -> Target:
    """The target of a kernel on `mesh`.

    Args:
        mesh: where it runs. None: the device that this is traced for: that of the mesh in whose
            `shard_map` it is, else jax's default device.

    Raises:
        ValueError: the devices are neither TPUs nor CPUs; use "blocked" there.
        ConfigError: a TPU that is not in kernels/chips.py.
    """
    if mesh is None:
        device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    else:
        device = mesh.devices.flat[0]
    if device.platform == "tpu":
        return Target(chip_of(device.device_kind), False)
    if device.platform == "cpu":
        return Target(INTERPRETED, pltpu.InterpretParams(uninitialized_memory="nan"))
    raise ValueError(
        f"implementation is 'pallas' on platform {device.platform!r}; it runs on 'tpu' (compiled) "
        "and 'cpu' (interpreted): use 'blocked'"
    )
