"""Pytrees whose field names state their dimensions: `q_DNH` is an array over D, N and H.

One table of dims gives the shapes, one map from dims to mesh axes gives the shardings, so the
same abstract tree drives initialisation, loading, sharding and ahead-of-time compilation.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")
_SUFFIX = re.compile(r"_([A-Z0-9]*[A-Z][A-Z0-9]*)$")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen keyword-only dataclass that jax treats as a tree."""
    return struct.dataclass(cls, kw_only=True)


def suffix(name: str) -> str:
    """The dims that a field name states: `suffix("q_DNH") == "DNH"`.

    Raises:
        ValueError: the name has no suffix; add one that lists its dims.
    """
    match = _SUFFIX.search(name)
    if match is None:
        raise ValueError(f"array field {name!r} has no dims suffix such as q_DNH")
    return match.group(1)


def shape(dims_text: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of a suffix; a digit stands for itself (`"3NH"` -> (3, N, H))."""
    return tuple(int(d) if d.isdigit() else dims[d] for d in dims_text)


def array(name: str, dims: Mapping[str, int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The abstract array that a field name describes under a table of dims."""
    return jax.ShapeDtypeStruct(shape(suffix(name), dims), jnp.dtype(dtype))


def abstract(cls: type[T], dims: Mapping[str, int], dtype: Any, **children: Any) -> T:
    """An instance of `cls` whose array fields are abstract; other fields come from `children`."""
    fields = {
        f.name: children[f.name] if f.name in children else array(f.name, dims, dtype)
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    }
    return cls(**fields)


def leaf_name(path: tuple[Any, ...]) -> str:
    """The last field name on a jax key path (list indices are skipped)."""
    for key in reversed(path):
        if isinstance(key, jax.tree_util.GetAttrKey):
            return key.name
    raise ValueError(f"no named field on the path {jax.tree_util.keystr(path)}")


def path_text(path: tuple[Any, ...]) -> str:
    """A jax key path as dotted text: `text.layers.3.q_DNH`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def spec(dims_text: str, axes: Mapping[str, str | None]) -> PartitionSpec:
    """The partition of an array with that suffix under a map from dims to mesh axes."""
    return PartitionSpec(*(axes.get(d) for d in dims_text))


def shardings(tree: T, mesh: Mesh, axes: Mapping[str, str | None]) -> T:
    """The NamedSharding of every leaf of `tree`, from its field name.

    A dim that the mesh axis does not divide stays whole on every device.
    """

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = spec(suffix(leaf_name(path)), axes)
        fitting = [
            n if n is not None and size % mesh.shape[n] == 0 else None
            for n, size in zip(names, leaf.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*fitting))

    return jax.tree_util.tree_map_with_path(of, tree)


def with_shardings(tree: T, tree_of_shardings: T) -> T:
    """The abstract tree with each leaf carrying its sharding."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, tree_of_shardings
    )


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves of an abstract or concrete tree, counted once (not per device)."""
    return sum(int(a.size) * a.dtype.itemsize for a in jax.tree.leaves(tree))
