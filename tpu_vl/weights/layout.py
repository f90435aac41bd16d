"""The grammar of checkpoint layouts, and which runs of a file an index of our array needs.

An array of the tree may hold more than the file: each entry of one dim several times (`repeat`),
or zeros behind the entries of another (`pad`).
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from tpu_vl.models.family import TensorMap

Range = tuple[int, int]


def parse_layout(layout: str) -> tuple[tuple[str, ...], ...]:
    """The dims on each axis of a checkpoint tensor: `"(3NH)D"` -> (("3", "N", "H"), ("D",)).

    Raises:
        ValueError: unbalanced parentheses: a defect in a family's checkpoint map.
    """
    groups: list[tuple[str, ...]] = []
    rest = layout
    while rest:
        if rest[0] == "(":
            inside, closed, rest = rest[1:].partition(")")
            if not closed or not inside:
                raise ValueError(f"layout {layout!r} has unbalanced or empty parentheses")
            groups.append(tuple(inside))
        else:
            groups.append((rest[0],))
            rest = rest[1:]
    return tuple(groups)


def axis_runs(
    group: Sequence[str], sizes: Mapping[str, int], ranges: Mapping[str, Range]
) -> list[slice]:
    """The contiguous runs of one checkpoint axis that hold the wanted range of each of its dims.

    Args:
        group: dims flattened on the axis, slowest first.
        sizes: of each dim.
        ranges: wanted [start, stop) of each dim.
    """
    partial = [i for i, d in enumerate(group) if ranges[d] != (0, sizes[d])]
    pivot = partial[-1] if partial else 0
    inner = int(np.prod([sizes[d] for d in group[pivot + 1 :]], dtype=np.int64))
    start, stop = ranges[group[pivot]]
    runs = []
    for outer in itertools.product(*(range(*ranges[d]) for d in group[:pivot])):
        offset = 0
        for value, d in zip(outer, group[:pivot], strict=True):
            offset = offset * sizes[d] + value
        offset *= sizes[group[pivot]]
        runs.append(slice((offset + start) * inner, (offset + stop) * inner))
    return runs


def file_sizes(tensor: TensorMap, held_sizes: Mapping[str, int]) -> dict[str, int]:
    """The dims of a tensor as the file has them.

    Args:
        tensor: its map.
        held_sizes: the dims of the array in the tree.
    """
    sizes = dict(held_sizes)
    if tensor.repeat is not None:
        dim, copies = tensor.repeat
        sizes[dim] //= copies
    if tensor.pad is not None:
        dim, size = tensor.pad
        sizes[dim] = size
    return sizes


def file_range(tensor: TensorMap, dim: str, wanted: Range, size: int) -> Range:
    """What of a dim in the file gives the wanted part of the dim in the tree.

    A repeated dim is read whole: the parts of several devices overlap, and it is small.

    Args:
        tensor: the map.
        dim: one of its dims.
        wanted: [start, stop) in the tree.
        size: of the dim in the file.
    """
    if tensor.repeat is not None and dim == tensor.repeat[0]:
        return 0, size
    return min(wanted[0], size), min(wanted[1], size)


def held(
    values: np.ndarray, tensor: TensorMap, dims: str, ranges: Mapping[str, Range]
) -> np.ndarray:
    """The wanted part of the tree's array from the part of the file that `file_range` names.

    Args:
        values: axes in the order of `dims`.
        tensor: the map.
        dims: of the array in the tree.
        ranges: wanted [start, stop) of each dim in the tree.
    """
    if tensor.repeat is not None:
        dim, copies = tensor.repeat
        start, stop = ranges[dim]
        values = np.take(values, np.arange(start, stop) // copies, axis=dims.index(dim))
    if tensor.pad is not None:
        dim = tensor.pad[0]
        axis, (start, stop) = dims.index(dim), ranges[dim]
        missing = stop - start - values.shape[axis]
        if missing:
            values = np.pad(values, [(0, missing if i == axis else 0) for i in range(values.ndim)])
    return values


def in_file(values: np.ndarray, tensor: TensorMap, dims: str) -> np.ndarray:
    """The inverse of `held` for whole arrays.

    Raises:
        ValueError: copies differ, or padding is not zero: the tree is no longer a checkpoint's.
    """
    if tensor.repeat is not None:
        dim, copies = tensor.repeat
        axis = dims.index(dim)
        first = np.take(values, np.arange(0, values.shape[axis], copies), axis=axis)
        if not np.array_equal(np.repeat(first, copies, axis), values):
            raise ValueError(f"{tensor.path}: the {copies} copies along {dim} differ")
        values = first
    if tensor.pad is not None:
        dim, size = tensor.pad
        values, padding = np.split(values, [size], axis=dims.index(dim))
        if padding.any():
            raise ValueError(f"{tensor.path}: the padding along {dim} behind {size} is not zero")
    return values
