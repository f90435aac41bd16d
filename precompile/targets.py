"""Described TPUs: the devices of a slice that is not here, for compiling and for planning."""

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from tpu_vl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of TPU host.

    Args:
        name: GKE machine type.
        chip: as in topology names.
        host_bounds: chips of one host in each direction.
        topologies: slices that can be built of it, by increasing number of hosts.
    """

    name: str
    chip: str
    host_bounds: tuple[int, int, int]
    topologies: tuple[str, ...]


_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

# GKE's machine types in late 2026.
MACHINES: Sequence[Machine] = (
    Machine(name="ct5lp-hightpu-1t", chip="v5e", host_bounds=(1, 1, 1), topologies=("1x1",)),
    Machine(name="ct5lp-hightpu-4t", chip="v5e", host_bounds=(2, 2, 1), topologies=_FLAT),
    Machine(name="ct5lp-hightpu-8t", chip="v5e", host_bounds=(2, 4, 1), topologies=("2x4",)),
    Machine(name="ct5p-hightpu-4t", chip="v5p", host_bounds=(2, 2, 1), topologies=_CUBES),
    Machine(name="ct6e-standard-1t", chip="v6e", host_bounds=(1, 1, 1), topologies=("1x1",)),
    Machine(name="ct6e-standard-4t", chip="v6e", host_bounds=(2, 2, 1), topologies=_FLAT),
    Machine(name="ct6e-standard-8t", chip="v6e", host_bounds=(2, 4, 1), topologies=("2x4",)),
    Machine(name="tpu7x-standard-1t", chip="tpu7x", host_bounds=(1, 1, 1), topologies=("1x1x1",)),
    Machine(name="tpu7x-standard-4t", chip="tpu7x", host_bounds=(2, 2, 1), topologies=_CUBES),
)

_HOST_FLAG = "xla_tpu_use_enhanced_launch_barrier"

# How libtpu calls a slice: by its chips, v5p by its cores.
_ACCELERATOR_TYPES = {
    "v5e": ("v5litepod", 1),
    "v5p": ("v5p", 2),
    "v6e": ("v6e", 1),
    "tpu7x": ("tpu7x", 1),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A slice to compile for.

    Args:
        machine: its hosts.
        topology: chips in each direction, such as "2x4".
    """

    machine: Machine
    topology: str

    def __str__(self) -> str:
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        return f"{self.machine.chip}:{self.topology}, {hosts} of type {self.machine.name}"

    @property
    def num_chips(self) -> int:
        """Chips of the whole slice."""
        return math.prod(int(side) for side in self.topology.split("x"))

    @property
    def num_hosts(self) -> int:
        """Hosts of the whole slice."""
        return self.num_chips // math.prod(self.machine.host_bounds)


def parse_target(text: str) -> Target:
    """The slice that `--target` names.

    Args:
        text: a chip or a GKE machine type, a colon, a topology. A chip stands for the machine
            type that gives the topology with the fewest hosts.

    Raises:
        ConfigError: there is no such slice; lists what there is.
    """
    name, _, topology = text.partition(":")
    machines = [m for m in MACHINES if name in (m.chip, m.name)]
    if not machines:
        chips = ", ".join(dict.fromkeys(m.chip for m in MACHINES))
        raise ConfigError(
            f"--target {text}: {name!r} is neither a chip ({chips}) nor a machine type "
            f"({', '.join(m.name for m in MACHINES)})"
        )
    fitting = [m for m in machines if topology in m.topologies]
    if not fitting:
        known = dict.fromkeys(f"{name}:{t}" for m in machines for t in m.topologies)
        raise ConfigError(f"--target {text}: no such topology; there are {', '.join(known)}")
    return min((Target(machine=m, topology=topology) for m in fitting), key=lambda t: t.num_hosts)


def describe_devices(target: Target) -> list[Any]:
    """The devices of a slice, in the order in which jax lists them on its hosts.

    Nothing here touches a TPU: this process computes on its CPU from now on.

    Raises:
        ConfigError: libtpu, which holds the compiler, is not installed or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError(
            f"--target {target}: the TPU compiler is not installed: pip install 'jax[tpu]' "
            "(Linux on x86-64)"
        )
    _prepare_environment(target)
    try:
        described = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{target.machine.chip}:{target.topology}",
            chips_per_host_bounds=list(target.machine.host_bounds),
        )
    except RuntimeError as error:
        raise ConfigError(f"--target {target}: libtpu refuses it: {error}") from error
    return list(described.devices)


def _prepare_environment(target: Target) -> None:
    """Keeps libtpu from looking for a TPU, its metadata server or its lock file."""
    prefix, cores = _ACCELERATOR_TYPES[target.machine.chip]
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{prefix}-{target.num_chips * cores}"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    # Another process may be compiling, or serving.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # What jax appends on a TPU host, so that the compiler is told here what it is told there.
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if _HOST_FLAG not in flags:
        os.environ["LIBTPU_INIT_ARGS"] = f"{flags} --{_HOST_FLAG}=true".strip()
    # Constants of a trace would go to a TPU of this machine otherwise.
    jax.config.update("jax_platforms", "cpu")
