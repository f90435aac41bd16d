"""Positions against transformers: M-RoPE over random prompts, patch order, interpolation."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpu_vl.vision.positions import interpolation_tables, mrope_positions, patch_coords

NEEDS_TORCH = "transformers' model code, the oracle, needs torch"
Frame = tuple[int, int, int]


def oracle_positions(kinds: list[int], images: list[Any], videos: list[Any]) -> Any:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    )
    model.get_vision_position_ids = Qwen3VLModel.get_vision_position_ids.__get__(model)
    positions, delta = Qwen3VLModel.get_rope_index(
        model,  # pyright: ignore[reportArgumentType]
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds], dtype=torch.int),
        torch.tensor(images) if images else None,
        torch.tensor(videos) if videos else None,
    )
    return positions[:, 0].numpy(), int(delta)


def random_prompt(rng: np.random.Generator) -> tuple[list[int], list[Any], list[Any], list[Frame]]:
    """Token kinds (text 0, image 1, video 2), grids, and the frames where they stand."""
    kinds = [0] * int(rng.integers(0, 9))
    images: list[Any] = []
    videos: list[Any] = []
    frames: list[Frame] = []
    for _ in range(int(rng.integers(0, 5))):
        grid_h, grid_w = (2 * int(x) for x in rng.integers(1, 9, 2))
        is_video = bool(rng.integers(2))
        groups = int(rng.integers(1, 5)) if is_video else 1
        (videos if is_video else images).append([groups, grid_h, grid_w])
        for _ in range(groups):
            kinds += [0] * int(rng.integers(1, 7))  # timestamp and vision start
            frames.append((len(kinds), grid_h, grid_w))
            kinds += [1 + is_video] * (grid_h * grid_w // 4)
            kinds += [0] * int(rng.integers(0, 3))
        kinds += [0]
    return kinds + [0] * int(rng.integers(0 if kinds else 1, 6)), images, videos, frames


def test_mrope_equals_transformers() -> None:
    rng = np.random.default_rng(0)
    mixed = 0
    for _ in range(300):
        kinds, images, videos, frames = random_prompt(rng)
        positions, delta = mrope_positions(len(kinds), frames, 2)
        expected, expected_delta = oracle_positions(kinds, images, videos)
        assert positions.dtype == np.int32
        assert np.array_equal(positions, expected)
        assert delta == expected_delta
        mixed += bool(images and videos)
    assert mixed > 50


def test_the_parity_test_sees_flat_positions_and_swapped_sides() -> None:
    frames = [(3, 4, 8), (14, 2, 6)]
    kinds = [0] * 3 + [1] * 8 + [0] * 3 + [1] * 3 + [0] * 2
    expected, delta = oracle_positions(kinds, [[1, 4, 8], [1, 2, 6]], [])
    positions, own_delta = mrope_positions(len(kinds), frames, 2)
    assert np.array_equal(positions, expected)
    assert own_delta == delta
    swapped, _ = mrope_positions(len(kinds), [(at, w, h) for at, h, w in frames], 2)
    assert not np.array_equal(swapped, expected)
    assert not np.array_equal(np.tile(np.arange(len(kinds)), (3, 1)), expected)


def test_text_only() -> None:
    positions, delta = mrope_positions(5, [], 2)
    assert np.array_equal(positions, np.tile(np.arange(5), (3, 1)))
    assert delta == 0


def test_image_after_fifteen_tokens_is_at_time_fifteen() -> None:
    positions, _ = mrope_positions(15 + 8 + 2, [(15, 4, 8)], 2)
    assert np.all(positions[0, 15:23] == 15)
    assert positions[1:, 15].tolist() == [15, 15]


def test_video_frames_start_where_the_text_stands() -> None:
    frames = [(15 + 6 * group, 4, 4) for group in range(4)]  # 4 tokens, then 2 of text
    positions, _ = mrope_positions(15 + 24, frames, 2)
    assert positions[:, 15].tolist() == [15, 15, 15]
    assert [int(positions[0, start]) for start, _, _ in frames] == [15, 19, 23, 27]


@pytest.mark.parametrize("chunks", [(16, 16, 8), (40,), (7, 32, 1)])
def test_delta_belongs_to_the_prompt_not_to_a_chunk(chunks: tuple[int, ...]) -> None:
    positions, delta = mrope_positions(40, [(5, 8, 16)], 2)
    assert delta == -24
    assert 40 + delta == 16
    assert int(positions.max()) + 1 == 16
    parts = np.split(positions, np.cumsum(chunks)[:-1], axis=1)
    assert np.array_equal(np.concatenate(parts, axis=1), positions)


@pytest.mark.parametrize("frames", [[(0, 4, 4), (3, 4, 4)], [(8, 4, 4)], [(6, 4, 4), (0, 2, 2)]])
def test_frames_outside_the_prompt_are_a_defect(frames: list[Frame]) -> None:
    with pytest.raises(ValueError, match="frame of"):
        mrope_positions(10, frames, 2)


GRIDS = [(2, 2), (2, 40), (64, 64), (6, 4), (48, 2), (34, 98), (96, 128), (4, 50)]


@pytest.mark.parametrize("side", [48, 7, 1])
def test_tables_equal_transformers_bit_for_bit(side: int) -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    from transformers import vision_utils

    rng = np.random.default_rng(side)
    grids = GRIDS + [(2 * int(h), 2 * int(w)) for h, w in rng.integers(1, 60, (40, 2))]
    for merge in (1, 2):
        for grid_h, grid_w in grids:
            grid = torch.tensor([[1, grid_h, grid_w]])
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid, side, mode="bilinear", align_corners=True, spatial_merge_size=merge
            )
            own_indices, own_weights = interpolation_tables(grid_h, grid_w, side, merge)
            assert own_indices.dtype == np.int32
            assert own_weights.dtype == np.float32
            assert np.array_equal(own_indices, indices.numpy().T)
            assert np.array_equal(own_weights.view(np.int32), weights.numpy().T.view(np.int32))
            coords = vision_utils.get_vision_position_ids(grid, merge).numpy().T
            assert np.array_equal(patch_coords(grid_h, grid_w, merge), coords)


def test_odd_grids_without_merging() -> None:
    coords = patch_coords(1, 3, 1)
    assert coords.tolist() == [[0, 0, 0], [0, 1, 2]]
    index, weight = interpolation_tables(1, 3, 5, 1)
    assert index[0].tolist() == [0, 2, 4]
    assert weight.sum(axis=0).tolist() == [1, 1, 1]
