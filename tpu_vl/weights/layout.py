"""The grammar of checkpoint layouts, and which runs of a file an index of our array needs."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

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
