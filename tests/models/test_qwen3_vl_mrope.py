"""M-RoPE of whole prompts equals transformers exactly, and its known faults cannot come back."""

from typing import Any

import numpy as np
import pytest

from tests.models.test_qwen3_vl_parity import PROMPTS
from tests.models.tiny import IDS, MERGE, Prompt, medium, torch
from tpu_vl.models import ops
from tpu_vl.vision.positions import mrope_positions


@pytest.mark.parametrize("name", [name for name in PROMPTS if name != "text"])
def test_positions_equal_reference(name: str, reference: Any) -> None:
    prompt = PROMPTS[name]()
    ids = torch.tensor([prompt.ids])
    kinds = (ids == IDS["image_token_id"]).int() + 2 * (ids == IDS["video_token_id"]).int()
    grids = {
        f"{kind}_grid_thw": torch.tensor([m.grid_thw for m in prompt.media if m.kind == kind])
        for kind in ("image", "video")
        if any(m.kind == kind for m in prompt.media)
    }
    want, delta = reference.model.get_rope_index(ids, kinds, **grids)
    got = mrope_positions(len(prompt.ids), prompt.frames, MERGE)
    np.testing.assert_array_equal(got[0], want[:, 0].numpy())
    assert got[1] == delta.item()


def test_image_after_15_tokens_starts_at_15() -> None:
    positions_3T, _ = mrope_positions(21, [(15, 4, 6)], MERGE)
    assert positions_3T[0, 15:].tolist() == [15] * 6
    assert positions_3T[1, 15:].tolist() == [15, 15, 15, 16, 16, 16]
    assert positions_3T[2, 15:].tolist() == [15, 16, 17, 15, 16, 17]


def test_video_after_15_tokens_starts_where_the_text_ends() -> None:
    prompt = Prompt().text(15).add(medium("video", 4, 2, 4, seed=0))
    positions_3T = prompt.positions
    starts = [start for start, *_ in prompt.frames]
    # Before a frame: two tokens of timestamp and the opening token; behind it the closing one.
    assert starts[0] == 18
    assert positions_3T[:, starts[0]].tolist() == [18, 18, 18]
    steps = np.diff(positions_3T[0, starts])
    assert steps.tolist() == [6, 6, 6]  # two columns, the closing token, three of the next frame


def test_delta_of_40_tokens_with_an_image_of_4_by_8_cells() -> None:
    positions_3T, delta = mrope_positions(40, [(5, 8, 16)], MERGE)
    assert delta == -24
    assert positions_3T.max() + 1 == 40 + delta == 16
    chunks = [positions_3T[:, a:b] for a, b in ((0, 16), (16, 32), (32, 40))]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), positions_3T)


def test_frequencies_interleave_time_row_column() -> None:
    axes = ops.interleaved_axes(64, (24, 20, 20))
    assert axes[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert axes[60:].tolist() == [0, 0, 0, 0]
    assert [int((axes == axis).sum()) for axis in range(3)] == [24, 20, 20]


def test_equal_positions_on_three_axes_are_plain_rope() -> None:
    inv_freq = ops.inverse_frequencies(14, 10_000.0)
    axes = ops.interleaved_axes(7, (3, 2, 2))
    line: Any = np.arange(9, dtype=np.int32)[None]
    three: Any = np.repeat(line, 3, axis=0)
    for a, b in zip(
        ops.rope_tables(line, inv_freq, axes, np.float32),
        ops.rope_tables(three, inv_freq, axes, np.float32),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
