"""The tree that a checkpoint would give, drawn from a seed instead."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_vl import tree
from tpu_vl.models.family import Family, TensorMap, placed_params
from tpu_vl.weights.layout import file_sizes, held, parse_layout


def random_params(family: Family, cfg: Any, mesh: Mesh, dtype: str, seed: int) -> Any:
    """Draws every array of a model, one after the other on the host; the mesh changes no value.

    Matrices are normal with variance 1 / fan-in, norm weights 1 and biases 0.

    Args:
        family, cfg: the model.
        mesh: where the arrays go, sharded as the family says.
        dtype: "float32" or "bfloat16".
        seed: >= 0.

    Returns:
        The tree of `family.abstract_params`.
    """
    placed = placed_params(family, cfg, dtype, mesh)
    maps = {m.path: m for m in family.checkpoint_map(cfg)}

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = tree.path_text(path)
        tensor, dims = maps[name], tree.suffix(tree.leaf_name(path))
        sizes = file_sizes(tensor, dict(zip(dims, leaf.shape, strict=True)))
        shape, scale = [sizes[d] for d in dims], _scale(tensor, sizes)
        if scale is None:
            values = np.full(shape, 0 if "_bias_" in tree.leaf_name(path) else 1, leaf.dtype)
        else:
            generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
            values = generator.standard_normal(shape, np.float32)
            values *= np.float32(scale)
            values = values.astype(leaf.dtype, copy=False)
        whole = {d: (0, size) for d, size in zip(dims, leaf.shape, strict=True)}
        values = held(values, tensor, dims, whole)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

    return jax.tree_util.tree_map_with_path(draw, placed)


def _scale(tensor: TensorMap, sizes: Mapping[str, int]) -> float | None:
    """Standard deviation of a matrix: its last file axis is what it sums over; None: a vector."""
    groups = parse_layout(tensor.layout)
    if len(groups) == 1:
        return None
    return float(np.prod([sizes[d] for d in groups[-1]])) ** -0.5
