"""What a client may ask of the processor: bounds, caps, and errors that name the field."""

from dataclasses import replace

import pytest

from tests.vision.synth import CFG, PARAM
from tpu_vl.errors import MediaError
from tpu_vl.vision.options import IMAGE_OPTIONS, VIDEO_OPTIONS, ImageOptions, VideoOptions


def image(**raw: object) -> ImageOptions:
    return ImageOptions.parse(raw, CFG, param=PARAM)


def video(**raw: object) -> VideoOptions:
    return VideoOptions.parse(raw, CFG, param=PARAM)


def test_defaults_are_the_servers() -> None:
    assert image() == ImageOptions(min_pixels=65_536, max_pixels=16_777_216)
    assert video() == VideoOptions(min_pixels=4_096, max_pixels=25_165_824)
    assert image(min_pixels=None, max_pixels=None) == image()


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"min_pixels": 0}, "min_pixels"),
        ({"max_pixels": -1}, "max_pixels"),
        ({"min_pixels": 2_000_000, "max_pixels": 1_000}, "min_pixels"),
        ({"min_pixels": 1e9}, "min_pixels"),
        ({"max_pixels": 1_000}, "max_pixels"),
        ({"min_pixels": 100.5}, "min_pixels"),
        ({"min_pixels": True}, "min_pixels"),
        ({"max_pixels": "big"}, "max_pixels"),
        ({"max_pixels": float("nan")}, "max_pixels"),
        ({"max_pixels": float("inf")}, "max_pixels"),
        ({"do_resize": 1}, "do_resize"),
    ],
)
def test_incoherent_image_options(raw: dict[str, object], name: str) -> None:
    with pytest.raises(MediaError, match=f"option {name} ") as caught:
        image(**raw)
    assert caught.value.param == PARAM
    with pytest.raises(MediaError, match=f"option {name} "):
        video(**raw)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"fps": 0}, "fps"),
        ({"fps": -2.0}, "fps"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 2.5}, "num_frames"),
        ({"fps": 2, "num_frames": 4}, "num_frames"),
        ({"max_frames": 0}, "max_frames"),
        ({"video_start": -1}, "video_start"),
        ({"video_start": 4, "video_end": 2}, "video_end"),
        ({"frames_indices": [0, 2, 1]}, "frames_indices"),
        ({"frames_indices": [0, True]}, "frames_indices"),
        ({"frames_indices": 3}, "frames_indices"),
        ({"frames_indices": [-1, 0]}, "frames_indices"),
    ],
)
def test_incoherent_video_options(raw: dict[str, object], name: str) -> None:
    with pytest.raises(MediaError, match=f"option {name} "):
        video(**raw)


def test_max_pixels_over_the_cap_is_clamped() -> None:
    assert image(max_pixels=1e12).max_pixels == CFG.image_max_pixels
    assert video(max_pixels=10**12).max_pixels == CFG.video_max_pixels
    assert image(max_pixels=100_000).max_pixels == 100_000


@pytest.mark.parametrize("name", ["max_pixel", "size", "fps", "videos_kwargs"])
def test_unknown_option_is_an_error(name: str) -> None:
    with pytest.raises(MediaError, match=f"option {name} is not an option; accepted: .*max_pixels"):
        image(**{name: 1})


def test_nested_and_dictionary_forms_raise() -> None:
    for raw in (
        {"videos_kwargs": {"min_pixels": 100_352}},
        {"size": {"shortest_edge": 100_352, "longest_edge": 151_200}},
    ):
        with pytest.raises(MediaError, match="is not an option"):
            video(**raw)
    parsed = video(min_pixels=100_352, max_pixels=151_200)
    assert (parsed.min_pixels, parsed.max_pixels) == (100_352, 151_200)


def test_the_message_is_short_however_long_the_name() -> None:
    with pytest.raises(MediaError) as caught:
        image(**{"x" * 100_000: 1})
    assert len(caught.value.message) < 300


def test_every_listed_option_is_read() -> None:
    raw: dict[str, object] = {
        "min_pixels": 5_000,
        "max_pixels": 6_000,
        "do_resize": False,
        "fps": 3,
        "max_frames": 7,
        "video_start": 1,
        "video_end": 2,
        "frames_indices": [0, 5],
    }
    assert set(raw) | {"num_frames"} == VIDEO_OPTIONS
    parsed = video(**raw)
    assert parsed == VideoOptions(
        min_pixels=5_000,
        max_pixels=6_000,
        do_resize=False,
        fps=3.0,
        max_frames=7,
        video_start=1.0,
        video_end=2.0,
        frames_indices=(0, 5),
    )
    assert replace(parsed, fps=None, num_frames=4) == video(**raw | {"fps": None, "num_frames": 4})
    assert IMAGE_OPTIONS < VIDEO_OPTIONS
