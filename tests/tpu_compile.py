"""Compiling for TPUs on a machine that has none: what a subprocess with libtpu needs.

A test runs a script in a process of its own (`run_script`), so that libtpu never enters the
process that runs the tests; the script makes its mesh with `tpu_topology_mesh`.
"""

import importlib.util
from pathlib import Path

import jax
from jax.sharding import Mesh

from bench import tpu_compiler
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile.targets import describe_devices, parse_target

ROOT = Path(__file__).resolve().parents[1]


def have_libtpu() -> bool:
    """Whether the compiler is installed: `pip install jax[tpu]` (Linux on x86-64 only)."""
    return importlib.util.find_spec("libtpu") is not None


def tpu_topology_mesh(topology: str, tp: int) -> Mesh:
    """The project's mesh over the first `tp` described, absent devices of a topology."""
    return make_mesh(tp, describe_devices(parse_target(topology)))


def on(array: jax.ShapeDtypeStruct, mesh: Mesh, *axes: str | None) -> jax.ShapeDtypeStruct:
    """An abstract array placed on the mesh by the axis of each dim."""
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
    )


def run_script(script: str, *args: str, timeout_s: float = 240) -> str:
    """Runs Python source in a process of its own, for `tpu_topology_mesh`; returns its output.

    Raises:
        RuntimeError: the script failed; the message carries what it wrote.
    """
    return tpu_compiler.run(script, *args, timeout_s=timeout_s)
