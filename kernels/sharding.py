"""How an op runs on a mesh: heads over "model" where they divide it, else whole on every device."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

HEADS_AXIS = "model"


def heads_axis(num_heads: int, mesh: Mesh | None) -> str | None:
    """The mesh axis that `num_heads` heads are spread over; None: every device holds them all."""
    if mesh is None:
        return None
    size = mesh.shape[HEADS_AXIS]
    return HEADS_AXIS if size > 1 and num_heads % size == 0 else None


def on_mesh(
    run: Callable[..., Any],
    mesh: Mesh | None,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """`run` on each device's own shard, or as it is where there is one device.

    Under shard_map no collective can appear that `run` does not ask for, and a Pallas call, which
    the partitioner cannot split, sees the local shapes.
    """
    if mesh is None or mesh.size == 1:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
