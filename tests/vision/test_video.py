"""Videos of every accepted container: which frames, when, which way up, and clear refusals."""

import contextlib
import logging
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.vision.synth import (
    CFG,
    FREE,
    LIMITS,
    PARAM,
    data,
    encode,
    make_audio,
    make_video,
    solid_frames,
    with_matrix,
)
from tests.vision.test_resize import as_uint8, video_processor
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.vision import video as video_module
from tpu_vl.vision.container import VideoFile
from tpu_vl.vision.options import VideoOptions
from tpu_vl.vision.resize import patchify
from tpu_vl.vision.video import SampledVideo, read_video, sample_indices, timestamp_text

CONTAINERS = [
    ("mp4", "libx264", "yuv420p"),
    ("mp4", "libsvtav1", "yuv420p"),
    ("mov", "mpeg4", "yuv420p"),
    ("webm", "libvpx", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("matroska", "libx264", "yuv420p"),
    ("matroska", "ffv1", "bgr0"),
    ("avi", "mpeg4", "yuv420p"),
    ("avi", "libx264", "yuv420p"),
    ("avi", "mjpeg", "yuvj420p"),
    ("gif", "gif", "rgb8"),
]


def read(
    file: bytes | Sequence[bytes],
    cfg: ProcessorConfig = CFG,
    limits: MediaLimits = LIMITS,
    **options: Any,
) -> SampledVideo:
    parsed = VideoOptions.parse(options, cfg, param=PARAM)
    video = read_video(file, cfg, limits, parsed, param=PARAM)
    grid_t, grid_h, grid_w = video.plan.grid_thw
    assert video.frames_THWC.shape == (2 * grid_t, 16 * grid_h, 16 * grid_w, 3)
    assert video.frames_THWC.dtype == np.uint8
    assert len(video.indices) == 2 * grid_t
    assert len(video.timestamps_s) == grid_t
    return video


def refused(file: bytes | Sequence[bytes], limits: MediaLimits = LIMITS, **options: Any) -> str:
    with pytest.raises(MediaError) as caught:
        read(file, CFG, limits, **options)
    error = caught.value
    assert error.param is not None
    assert error.param.startswith(PARAM)
    assert error.message.startswith(error.param)
    assert "\n" not in error.message
    assert len(error.message) < 300
    return error.message


def markers(video: SampledVideo) -> list[str]:
    return [timestamp_text(t)[1:].split(" ")[0] for t in video.timestamps_s]


def levels(video: SampledVideo) -> list[int]:
    return [round(float(frame.mean())) for frame in video.frames_THWC]


def greys(count: int) -> list[np.ndarray]:
    return solid_frames([4 * (number % 60) + 10 for number in range(count)])


@pytest.mark.parametrize(("fmt", "codec", "pixels"), CONTAINERS)
def test_every_container_gives_the_same_frames(fmt: str, codec: str, pixels: str) -> None:
    video = read(make_video(greys(60), fmt, codec, pixels=pixels))
    assert video.indices == (0, 20, 39, 59)
    assert video.fps == pytest.approx(30)
    assert markers(video) == ["0.3", "1.6"]
    assert np.abs(np.array(levels(video)) - [10, 90, 166, 246]).max() <= 16  # GIF: 6 greys


@pytest.mark.parametrize(("fmt", "codec", "pixels"), CONTAINERS)
def test_cut_points_are_absolute_in_every_container(fmt: str, codec: str, pixels: str) -> None:
    options: dict[str, Any] = {} if fmt == "gif" else {"g": "12"}
    file = make_video(greys(300), fmt, codec, pixels=pixels, **options)
    video = read(file, video_start=2, video_end=4)
    assert video.indices == (60, 80, 100, 120)
    assert markers(video) == ["2.3", "3.7"]
    expected = [4 * (index % 60) + 10 for index in video.indices]
    assert np.abs(np.array(levels(video)) - expected).max() <= 16
    assert read(file, video_start=9.9, num_frames=3).indices[0] == 297


def test_cut_points_outside_the_video() -> None:
    file = make_video(greys(30))
    assert "the video ends at 0.97 s" in refused(file, video_start=5)
    assert read(file, video_start=0.5, video_end=100).indices == (15, 20, 24, 29)


@pytest.mark.parametrize(
    ("frames", "options", "expected"),
    [
        (240, {"fps": 2}, "0.3 1.3 2.4 3.5 4.5 5.6 6.6 7.7"),
        (300, {"num_frames": 16}, "0.3 1.7 3.0 4.3 5.6 7.0 8.3 9.6"),
    ],
)
def test_markers_use_the_rate_of_the_source(
    frames: int, options: dict[str, Any], expected: str
) -> None:
    assert markers(read(make_video(greys(frames)), **options)) == expected.split()


def test_max_frames_bounds_frames_and_markers_alike() -> None:
    file = make_video(greys(900), "matroska", "mpeg4")
    assert read(file).plan.grid_thw[0] == 30
    video = read(file, fps=2, max_frames=16)
    assert video.plan.grid_thw[0] == 8
    assert len(markers(video)) == 8
    assert video.indices[-1] == 899
    assert len(read(file, limits=MediaLimits(max_video_frames=6), num_frames=500).indices) == 6
    assert len(read(file, replace(CFG, video_max_frames=10), max_frames=500).indices) == 10


def test_more_frames_asked_for_than_there_are() -> None:
    video = read(make_video(greys(31)), num_frames=32)
    assert video.plan.grid_thw[0] == 16
    assert video.indices == (*range(31), 30)
    nine = read(
        make_video(solid_frames(range(10, 100, 10)), "matroska", "ffv1", pixels="bgr0"),
        num_frames=16,
    )
    assert nine.plan.grid_thw[0] == 5
    assert nine.plan.num_tokens == 5 * nine.plan.tokens_per_frame
    assert levels(nine) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 90]


def test_one_frame_is_repeated_before_the_resize() -> None:
    for file in ([encode(solid_frames([9], 256, 256)[0])], make_video(solid_frames([9], 256, 256))):
        video = read(file)
        assert video.plan.grid_thw == (1, 16, 16)
        assert video.plan.num_tokens == 64
        assert video.indices == (0, 0)
        assert video.timestamps_s == (0.0,)


def frame_list(count: int, size: int = 64) -> list[bytes]:
    return [encode(frame) for frame in solid_frames(range(10, 10 + count), size, size)]


def test_odd_frame_lists_repeat_the_last_frame() -> None:
    video = read(frame_list(5, 256), fps=1)
    assert video.plan.grid_thw == (3, 16, 16)
    assert video.plan.num_tokens == 192
    assert markers(video) == ["0.5", "2.5", "4.0"]
    assert video.indices == (0, 1, 2, 3, 4, 4)
    assert levels(video) == [10, 11, 12, 13, 14, 14]


def test_frame_lists_are_not_resampled() -> None:
    video = read([encode(f, "JPEG") for f in solid_frames([1, 2, 3, 4])], fps=2)
    assert video.plan.grid_thw[0] == 2
    assert markers(video) == ["0.2", "1.2"]
    for option in ("num_frames", "max_frames", "video_start", "video_end"):
        assert f"option {option}" in refused(frame_list(4), LIMITS, **{option: 1})


def test_rates_of_frame_lists() -> None:
    assert markers(read(frame_list(8), fps=1)) == ["0.5", "2.5", "4.5", "6.5"]
    assert markers(read(frame_list(8))) == ["0.0", "0.1", "0.2", "0.3"]
    indices = [0, 36, 90, 150, 200, 240, 300, 359]
    video = read(frame_list(8), fps=30, frames_indices=indices)
    expected = [(indices[i] + indices[i + 1]) / 60 for i in range(0, 8, 2)]
    assert video.timestamps_s == pytest.approx(expected)
    assert "8 frames" in refused(frame_list(8), fps=30, frames_indices=[0, 1])
    assert "frame list" in refused(make_video(greys(4)), frames_indices=[0, 1, 2, 3])


def test_bad_frame_lists() -> None:
    assert "empty list" in refused([])
    bad = [*frame_list(3), encode(np.zeros((32, 64, 3), np.uint8))]
    assert ".[3]: the frame is 64 x 32" in refused(bad)
    assert ".[1]" in refused([frame_list(1)[0], b"nothing"])


def test_frame_count_is_checked_before_any_frame_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(video_module, "decode_image", lambda *args, **_: calls.append(args))
    one = encode(np.zeros((1, 1, 3), np.uint8), "JPEG")
    tracemalloc.start()
    with pytest.raises(MediaTooLargeError, match="100000 frames, over the limit of 768"):
        read([one] * 100_000, limits=MediaLimits(max_bytes=1 << 40))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert not calls


def test_limits_of_files() -> None:
    file = make_video(greys(50))
    with pytest.raises(MediaTooLargeError, match="more than 49 frames"):
        read(file, limits=MediaLimits(max_decoded_frames=49))
    assert read(file, limits=MediaLimits(max_decoded_frames=50)).plan.grid_thw[0] == 2
    with pytest.raises(MediaTooLargeError, match="64 x 64 pixels, over the limit of 4095"):
        read(file, limits=MediaLimits(max_pixels=4_095))
    with pytest.raises(MediaTooLargeError, match=f"{len(file)} bytes"):
        read(file, limits=MediaLimits(max_bytes=len(file) - 1))
    with pytest.raises(MediaTooLargeError, match=r"16 patches.*15 patches"):
        read(file, limits=MediaLimits(max_frame_patches=15))
    with pytest.raises(MediaTooLargeError, match="bytes"):
        read(frame_list(3), limits=MediaLimits(max_bytes=200))


def test_gif_as_a_video_is_no_silent_still() -> None:
    video = read(data("anim3.gif"))
    assert video.plan.grid_thw[0] == 2
    assert video.indices == (0, 1, 2, 2)
    centre = video.frames_THWC[:, 32, 32]
    assert centre.tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255], [0, 0, 255]]


def test_transparent_gif_is_shown_over_white() -> None:
    cut = np.zeros((64, 64, 4), np.uint8)
    cut[16:48, 16:48] = (200, 0, 0, 255)
    stills = [Image.fromarray(np.roll(cut, 8 * i, axis=1)) for i in range(4)]
    file = encode(stills[0], "GIF", save_all=True, append_images=stills[1:], disposal=2)
    video = read(file)
    assert video.frames_THWC[:, 2, 2].tolist() == [[255, 255, 255]] * 4
    assert video.frames_THWC[0, 30, 30].tolist() == [200, 0, 0]


def half_red(height: int, width: int) -> list[np.ndarray]:
    frame = np.zeros((height, width, 3), np.uint8)
    frame[:, : width // 2, 0] = 255
    return [frame] * 4


@pytest.mark.parametrize(
    ("matrix", "size", "red"),
    [
        ((1, 0, 0, 1), (48, 64), "left"),
        ((0, 1, -1, 0), (64, 48), "top"),  # a quarter turn clockwise
        ((-1, 0, 0, -1), (48, 64), "right"),
        ((0, -1, 1, 0), (64, 48), "bottom"),
        ((-1, 0, 0, 1), (48, 64), "right"),  # mirrored, as from a front camera
        ((0, 1, 1, 0), (64, 48), "top"),
    ],
)
def test_display_matrix(matrix: tuple[int, ...], size: tuple[int, int], red: str) -> None:
    file = with_matrix(make_video(half_red(48, 64)), *matrix)
    with VideoFile(file, LIMITS, param=PARAM) as opened:
        ((_, rgb),) = opened.frames(np.array([0]))
    assert rgb.shape[:2] == size
    edges = {"left": rgb[:, :8], "right": rgb[:, -8:], "top": rgb[:8], "bottom": rgb[-8:]}
    assert [name for name, edge in edges.items() if edge[..., 0].min() > 200] == [red]
    plan = read(with_matrix(make_video(half_red(96, 160)), *matrix)).plan
    assert (plan.height, plan.width) == ((160, 96) if size[0] > size[1] else (96, 160))


def test_variable_rate_uses_presentation_times() -> None:
    times = [number / 10 for number in range(10)] + [9.0]
    for fmt, codec in (("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx-vp9")):
        video = read(make_video(greys(11), fmt, codec, rate=10, times_s=times))
        assert video.indices == (*range(11), 10), fmt
        assert video.timestamps_s[-1] == pytest.approx(9.0, abs=0.01)
        assert video.timestamps_s[2] == pytest.approx(0.45, abs=0.01)  # frames 4 and 5
        cut = read(make_video(greys(11), fmt, codec, rate=10, times_s=times), video_start=0.75)
        assert set(cut.indices) == {8, 9, 10}


def with_blank_frames(file: bytes, numbers: Sequence[int]) -> bytes:
    """A motion-JPEG file some of whose frames are overwritten by zeros."""
    damaged = bytearray(file)
    starts = [i for i in range(len(file)) if file[i : i + 3] == b"\xff\xd8\xff"]
    for number in numbers:
        end = file.index(b"\xff\xd9", starts[number]) + 2
        damaged[starts[number] : end] = bytes(end - starts[number])
    return bytes(damaged)


@pytest.mark.parametrize("fmt", ["matroska", "avi"])
def test_an_unreadable_frame_is_replaced_by_its_neighbour(
    fmt: str, caplog: pytest.LogCaptureFixture
) -> None:
    greys_26 = solid_frames(range(5, 239, 9))
    file = with_blank_frames(make_video(greys_26, fmt, "mjpeg", pixels="yuvj420p"), [17])
    with caplog.at_level(logging.WARNING):
        video = read(file, num_frames=26)
    assert [record.message for record in caplog.records] == [
        f"{PARAM}: frame 17 cannot be decoded; frame 16 stands in for it"
    ]
    assert video.indices == tuple(range(26))
    assert video.plan.grid_thw[0] == len(video.timestamps_s) == 13
    expected = [5 + 9 * (i if i != 17 else 16) for i in range(26)]
    assert np.abs(np.array(levels(video)) - expected).max() <= 3


def test_all_frames_unreadable() -> None:
    file = with_blank_frames(make_video(greys(4), "avi", "mjpeg", pixels="yuvj420p"), range(4))
    assert "no frame of the video can be decoded" in refused(file)


@pytest.mark.parametrize(("fmt", "codec", "pixels"), CONTAINERS)
def test_truncated_files(fmt: str, codec: str, pixels: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), np.uint8)
    file = make_video(list(noise), fmt, codec, pixels=pixels)
    for share in (0.001, 0.05, 0.4, 0.8, 0.99):
        message = refused(file[: int(len(file) * share)])
        assert any(word in message for word in ("truncated", "empty", "none of")), share


def test_truncated_with_the_index_in_front() -> None:
    file = make_video(greys(30), "mp4", "libx264")
    moov, mdat = file.index(b"moov") - 4, file.index(b"mdat") - 4
    assert mdat < moov  # the usual order; the size of the data box tells what is missing
    assert "truncated" in refused(file[: mdat + 100])


def test_files_that_are_no_videos() -> None:
    assert "empty (0 bytes)" in refused(b"")
    assert "audio only" in refused(make_audio())
    assert "audio only" in refused(make_audio("matroska"))
    assert "image_url" in refused(encode(np.zeros((64, 64, 3), np.uint8)))
    assert "HTML" in refused(b"<html></html>")
    assert "none of" in refused(np.random.default_rng(0).bytes(4_000))
    assert "none of" in refused(b"#EXTM3U\n#EXTINF:1\nhttp://192.0.2.1/a.ts\n")
    assert "none of" in refused(b"ffconcat version 1.0\nfile /etc/passwd\n")


def test_hidden_vp8_frames_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (128, 128, 3), np.uint8)
    frames = [np.roll(base, 2 * i, axis=1) for i in range(60)]
    options: dict[str, Any] = {
        "auto-alt-ref": "1",
        "lag-in-frames": "16",
        "deadline": "best",
        "b": "300000",
    }
    file = make_video(frames, "webm", "libvpx", **options)
    with VideoFile(file, LIMITS, param=PARAM) as opened:
        assert len(opened.times_s) == 60
    with caplog.at_level(logging.WARNING):
        assert read(file, num_frames=60).indices == tuple(range(60))
    assert not caplog.records


def test_frames_are_resized_as_they_are_decoded() -> None:
    frames = [np.full((720, 1_280, 3), 8 * (i % 30), np.uint8) for i in range(60)]
    file = make_video(frames, "mp4", "libx264", preset="ultrafast")
    cfg = replace(CFG, video_max_pixels=60 * 64 * 96)
    tracemalloc.start()
    video = read(file, cfg, num_frames=60)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(video.indices) == 60
    assert peak < 16 << 20  # all frames at once would be 166 MB


def test_sampling_equals_transformers() -> None:
    processor = video_processor(CFG)
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    rng = np.random.default_rng(0)
    for _ in range(300):
        total, rate = int(rng.integers(1, 4_000)), float(rng.choice([10, 24, 25, 29.97, 30, 60]))
        options: dict[str, Any] = {}
        kind = int(rng.integers(3))
        if kind == 1:
            options = {"fps": float(rng.choice([0.5, 1, 2, 3.7, 8]))}
        elif kind == 2:
            options = {"num_frames": int(rng.integers(1, min(total, 768) + 1))}
        expected = processor.sample_frames(
            VideoMetadata(total_num_frames=total, fps=rate), **options
        )
        parsed = VideoOptions.parse(options, CFG, param=PARAM)
        times = np.arange(total) / rate
        indices = sample_indices(times, rate, CFG, LIMITS, parsed, param=PARAM)
        assert np.array_equal(indices, expected), (total, rate, options)
        oracle = Qwen3VLProcessor._calculate_timestamps(processor, expected.tolist(), rate)
        padded = [*indices.tolist(), *indices[len(indices) - len(indices) % 2 :].tolist()]
        own = video_module.group_times([float(times[i]) for i in padded], 2)
        assert list(own) == oracle


def test_files_equal_transformers_from_end_to_end() -> None:
    processor = video_processor(CFG)
    torch = pytest.importorskip("torch")
    from transformers.video_utils import VideoMetadata

    rng = np.random.default_rng(3)
    for _ in range(8):
        total, height, width = (int(rng.integers(*r)) for r in ((3, 90), (17, 90), (17, 90)))
        frames = rng.integers(0, 256, (total, height, width, 3), np.uint8)
        video = read(
            make_video(list(frames), "matroska", "ffv1", rate=12, pixels="bgr0"), limits=FREE
        )
        expected = processor(
            [torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[VideoMetadata(total_num_frames=total, fps=12.0)],
            do_sample_frames=True,
            return_metadata=True,
            return_tensors="pt",
        )
        assert video.plan.grid_thw == tuple(expected["video_grid_thw"][0].tolist())
        sampled = expected["video_metadata"][0].frames_indices
        assert list(video.indices)[: len(sampled)] == list(sampled)
        own = patchify(video.frames_THWC, video.plan, 2)
        assert np.array_equal(own, as_uint8(expected["pixel_values_videos"], CFG))


def test_the_wrong_rate_would_be_seen() -> None:
    file = make_video(greys(240))
    times = np.arange(240) / 2.0  # the sampling rate taken for the rate of the source
    wrong = sample_indices(
        times, 2.0, CFG, LIMITS, VideoOptions.parse({}, CFG, param=PARAM), param=PARAM
    )
    assert len(wrong) != len(read(file).indices)


def test_every_video_of_a_request_gives_the_same_each_time() -> None:
    files = [make_video(greys(count)) for count in (40, 90, 150)]
    first = [markers(read(file, fps=2)) for file in files]
    for _ in range(4):
        assert [markers(read(file, fps=2)) for file in files] == first
    assert [len(m) for m in first] == [2, 3, 5]


@pytest.mark.parametrize(("fmt", "codec", "pixels"), CONTAINERS)
def test_damage_never_escapes_as_another_error(fmt: str, codec: str, pixels: str) -> None:
    rng = np.random.default_rng(0)
    file = make_video(greys(12), fmt, codec, pixels=pixels)
    for count in rng.integers(1, 40, 25):
        damaged = bytearray(file)
        for at in rng.integers(0, len(file), count):
            damaged[at] = int(rng.integers(256))
        with contextlib.suppress(MediaError):
            read(bytes(damaged), limits=MediaLimits(max_pixels=1 << 20))
