"""The layout grammar, against slicing the whole array."""

import itertools

import numpy as np
import pytest

from tpu_vl.weights.layout import axis_runs, parse_layout


def test_parse_layout() -> None:
    assert parse_layout("(3NH)D") == (("3", "N", "H"), ("D",))
    assert parse_layout("D(NH)") == (("D",), ("N", "H"))
    assert parse_layout("VD") == (("V",), ("D",))


@pytest.mark.parametrize("layout", ["(NHD", "()D"])
def test_broken_layout_is_refused(layout: str) -> None:
    with pytest.raises(ValueError, match="parentheses"):
        parse_layout(layout)


def test_runs_of_one_axis_equal_slicing_its_dims() -> None:
    sizes = {"3": 3, "N": 4, "H": 5}
    flat = np.arange(60)
    whole = flat.reshape(3, 4, 5)
    options = [[(0, n), (1, n), (0, n - 1), (1, 2)] for n in (3, 4, 5)]
    for ranges in itertools.product(*options):
        wanted = dict(zip("3NH", ranges, strict=True))
        runs = axis_runs(("3", "N", "H"), sizes, wanted)
        got = np.concatenate([flat[r] for r in runs])
        want = whole[tuple(slice(*r) for r in ranges)].reshape(-1)
        np.testing.assert_array_equal(got, want)


def test_a_slice_of_heads_is_one_run_per_projection() -> None:
    sizes = {"3": 3, "N": 4, "H": 5}
    runs = axis_runs(("3", "N", "H"), sizes, {"3": (0, 3), "N": (2, 4), "H": (0, 5)})
    assert runs == [slice(10, 20), slice(30, 40), slice(50, 60)]
    assert axis_runs(("N", "H"), sizes, {"N": (1, 3), "H": (0, 5)}) == [slice(5, 15)]
