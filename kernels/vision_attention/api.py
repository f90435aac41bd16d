"""Bidirectional attention over packed frames: each patch sees its own segment only."""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh, PartitionSpec

from tpu_vl.kernels import checks, sharding
from tpu_vl.kernels.interpret import target
from tpu_vl.kernels.vision_attention import pallas_tpu, reference

_IMPLEMENTATIONS: dict[str, Callable[[Mesh | None], Callable[..., jax.Array]]] = {
    "dense": lambda _: reference.dense,
    "blocked": lambda _: reference.blocked,
    "pallas": lambda mesh: partial(pallas_tpu.packed, target=target(mesh)),
}

pick = checks.default_implementation


def vision_attention(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    bounds_2P: jax.Array,
    num_patches: jax.Array,
    *,
    scale: float,
    implementation: str,
    mesh: Mesh | None,
) -> jax.Array:
    """Softmax attention of every patch over the patches of its own segment.

    Logits, softmax and sums are float32. Rows from `num_patches` on may hold anything, NaN too:
    they reach no valid row and come back as zeros.

    Args:
        q_PNH: float32 or bfloat16 queries.
        k_PNH: keys, dtype of `q_PNH`.
        v_PNH: values, dtype of `q_PNH`.
        bounds_2P: int32 first and one-past-last patch of each patch's segment. Segments are runs
            of neighbouring patches; those of valid patches end at or before `num_patches`.
        num_patches: int32 scalar in [0, P], valid patches, which come first.
        scale: factor of the logits, usually H ** -0.5.
        implementation: "dense" (the truth: O(P^2) memory, differentiable), "blocked" (CPU and
            GPU: work grows with the sum of squared segment lengths) or "pallas" (TPU, the same
            work; interpreted on a CPU, see kernels/interpret.py); see `pick`.
        mesh: with a "model" axis; heads are sharded over it if it divides N, else every device
            computes them all. None: one device.

    Returns:
        out_PNH, dtype of `q_PNH`.

    Raises:
        ValueError: a shape, dtype or name breaks the contract, or "pallas" is wanted on a GPU or
            for heads that do not fit in VMEM; the message names it.
    """
    checks.check_rank("q_PNH", q_PNH, 3)
    checks.check_float("q_PNH", q_PNH)
    for name, array in (("k_PNH", k_PNH), ("v_PNH", v_PNH)):
        checks.check_shape(name, array, q_PNH.shape)
        if array.dtype != q_PNH.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}; q_PNH has {q_PNH.dtype}: make equal")
    checks.check_shape("bounds_2P", bounds_2P, (2, q_PNH.shape[0]))
    checks.check_int32("bounds_2P", bounds_2P)
    checks.check_shape("num_patches", num_patches, ())
    checks.check_int32("num_patches", num_patches)
    checks.check_implementation(implementation, _IMPLEMENTATIONS)

    run = partial(_IMPLEMENTATIONS[implementation](mesh), scale=scale)
    heads = PartitionSpec(None, sharding.heads_axis(q_PNH.shape[1], mesh), None)
    whole = PartitionSpec()
    split = sharding.on_mesh(run, mesh, (heads, heads, heads, whole, whole), heads)
    with jax.named_scope("vision_attention"):
        return split(q_PNH, k_PNH, v_PNH, bounds_2P, num_patches)
