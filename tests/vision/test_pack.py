"""Whole frames in calls of a few capacities, and the arrays of a call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_vl.errors import MediaTooLargeError
from tpu_vl.vision.pack import FramePlan, PackedCall, fill_call, frame_tables, pack_frames
from tpu_vl.vision.positions import interpolation_tables, patch_coords

CAPACITIES = (64, 256, 1_024)


def frame(key: object, grid_h: int, grid_w: int) -> FramePlan:
    return FramePlan(key=key, grid_h=grid_h, grid_w=grid_w)  # pyright: ignore


def filled(call: PackedCall, width: int = 12) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    patches = [rng.integers(1, 256, (f.num_patches, width), np.uint8) for f in call.frames]
    rows = [
        np.arange(f.num_patches // 4, dtype=np.int32) + 100 * i for i, f in enumerate(call.frames)
    ]
    return fill_call(call, patches, rows, side=8, merge_size=2, layers=(0, 4)), patches


def test_smallest_capacity_that_holds_the_call() -> None:
    assert [c.capacity for c in pack_frames([frame(0, 8, 8)], CAPACITIES)] == [64]
    assert [c.capacity for c in pack_frames([frame(0, 8, 10)], CAPACITIES)] == [256]
    assert [c.capacity for c in pack_frames([frame(i, 8, 8) for i in range(5)], CAPACITIES)] == [
        1024
    ]
    assert pack_frames([], CAPACITIES) == []


def test_exact_fit_of_the_largest_capacity() -> None:
    calls = pack_frames([frame(0, 32, 32)], CAPACITIES)
    assert [(c.capacity, c.num_patches) for c in calls] == [(1_024, 1_024)]
    calls = pack_frames([frame(i, 16, 32) for i in range(4)], CAPACITIES)
    assert [len(c.frames) for c in calls] == [2, 2]


def test_one_patch_more_is_refused_with_both_numbers() -> None:
    with pytest.raises(MediaTooLargeError, match=r"1025 patches.*capacity 1024"):
        pack_frames([frame(0, 32, 32), frame(1, 1_025, 1)], CAPACITIES)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), max_size=40))
def test_packing_keeps_order_and_bounds(sizes: list[tuple[int, int]]) -> None:
    frames = [frame(i, 2 * h, 2 * w) for i, (h, w) in enumerate(sizes)]
    calls = pack_frames(frames, CAPACITIES)
    assert [f for call in calls for f in call.frames] == frames
    for number, call in enumerate(calls):
        assert call.num_patches <= call.capacity
        assert call.capacity in CAPACITIES
        assert all(c < call.num_patches for c in CAPACITIES if c < call.capacity)
        if number + 1 < len(calls):  # no call is closed before it is full
            assert call.num_patches + calls[number + 1].frames[0].num_patches > CAPACITIES[-1]


def test_arrays_of_a_call() -> None:
    call = pack_frames([frame("a", 4, 6), frame("b", 2, 4)], CAPACITIES)[0]
    arrays, patches = filled(call)
    assert call.capacity == 64
    assert arrays["num_patches_X"].tolist() == [32]
    assert np.array_equal(arrays["patches_PW"][:32], np.concatenate(patches))
    assert not arrays["patches_PW"][32:].any()
    assert np.array_equal(arrays["coords_2P"][:, :24], patch_coords(4, 6, 2))
    assert np.array_equal(arrays["coords_2P"][:, 24:32], patch_coords(2, 4, 2))
    index, weight = interpolation_tables(2, 4, 8, 2)
    assert np.array_equal(arrays["interp_index_4P"][:, 24:32], index)
    assert np.array_equal(arrays["interp_weight_4P"][:, 24:32], weight)
    assert not arrays["interp_weight_4P"][:, 32:].any()
    assert arrays["bounds_2P"][0].tolist() == [0] * 24 + [24] * 8 + [32] * 32
    assert arrays["bounds_2P"][1].tolist() == [24] * 24 + [32] * 8 + [64] * 32
    assert arrays["rows_M"].tolist() == [0, 1, 2, 3, 4, 5, 100, 101] + [-1] * 8
    assert arrays["layers_2"].tolist() == [0, 4]
    wanted = {"patches_PW": np.uint8, "interp_weight_4P": np.float32}
    for name, array in arrays.items():
        assert array.dtype == wanted.get(name, np.int32), name


def test_bins_lie_apart_and_count_for_themselves() -> None:
    frames = [frame("a", 4, 6), frame("b", 2, 4), frame("c", 2, 2)]
    (call,) = pack_frames(frames, CAPACITIES, num_bins=2)
    assert (call.capacity, call.bins, call.patches_of_bins) == (64, (0, 1, 1), (24, 12))
    arrays, patches = filled(call)
    assert arrays["num_patches_X"].tolist() == [24, 12]
    assert np.array_equal(arrays["patches_PW"][32:44], np.concatenate(patches[1:]))
    assert not arrays["patches_PW"][24:32].any()
    own = [0] * 24 + [24] * 8, [0] * 8 + [8] * 4 + [12] * 20
    assert arrays["bounds_2P"][0].tolist() == own[0] + own[1]
    assert arrays["bounds_2P"][1].tolist() == [24] * 24 + [32] * 8 + [8] * 8 + [12] * 4 + [32] * 20
    assert arrays["rows_M"].tolist() == [*range(6), -1, -1, 100, 101, 200] + [-1] * 5
    assert np.array_equal(arrays["coords_2P"][:, 40:44], patch_coords(2, 2, 2))


def test_a_frame_must_fit_one_bin() -> None:
    assert len(pack_frames([frame(0, 16, 32)] * 2, CAPACITIES, num_bins=2)) == 1
    with pytest.raises(MediaTooLargeError, match=r"514 patches.*capacity 512"):
        pack_frames([frame(0, 2, 257)], CAPACITIES, num_bins=2)


def test_names_are_those_of_the_tower_inputs() -> None:
    import dataclasses

    from tpu_vl.models.family import EncodeInputs

    arrays, _ = filled(pack_frames([frame(0, 8, 8)], CAPACITIES)[0])
    assert set(arrays) == {field.name for field in dataclasses.fields(EncodeInputs)}  # pyright: ignore
    assert arrays["bounds_2P"].tolist() == [[0] * 64, [64] * 64]  # full: no padding segment


def test_wrong_shapes_are_a_defect() -> None:
    call = pack_frames([frame("a", 2, 4)], CAPACITIES)[0]
    patches, rows = np.zeros((8, 12), np.uint8), np.zeros(2, np.int32)
    for bad in (([patches[:4]], [rows]), ([patches], [rows[:1]]), ([patches], [])):
        with pytest.raises(ValueError, match=r"'a'|zip"):
            fill_call(call, *bad, side=8, merge_size=2, layers=(0, 1))


def test_tables_are_cached_within_bounds_and_read_only() -> None:
    frame_tables.cache_clear()
    for size in range(2, 202, 2):
        frame_tables(size, 2, 8, 2)
    info = frame_tables.cache_info()
    assert info.maxsize is not None
    assert info.currsize == info.maxsize <= 64
    with pytest.raises(ValueError, match="read-only"):
        frame_tables(2, 2, 8, 2)[0][0] = 1
