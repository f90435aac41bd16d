"""From bytes to patches: what reaches the engine, and what its digest covers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tests.vision.synth import CFG, CFG_25, LIMITS, PARAM, data, encode, make_video, solid_frames
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.vision import process
from tpu_vl.vision.process import ProcessedMedia, media_digest, process_image, process_video


def image(file: bytes, cfg: ProcessorConfig = CFG, **options: object) -> ProcessedMedia:
    return process_image(file, cfg, LIMITS, options, param=PARAM)


def test_image_patches_are_ready_to_travel() -> None:
    media = image(data("s_1000x1000.png"))
    assert media.kind == "image"
    assert media.grid_thw == (1, 62, 62)
    assert media.num_tokens == media.tokens_per_frame == 961
    assert media.patches_PW.shape == (3_844, 3 * 2 * 16 * 16)
    assert media.patches_PW.dtype == np.uint8
    assert media.patches_PW.flags.c_contiguous
    assert len(media.digest) == 32
    assert media.timestamps_s == ()


@pytest.mark.parametrize(
    ("name", "tokens", "tokens_25"),
    [("s_27x29.png", 72, 6), ("s_16x16.png", 64, 4), ("s_1x1.png", 64, 4)],
)
def test_small_images_are_enlarged(name: str, tokens: int, tokens_25: int) -> None:
    assert image(data(name)).num_tokens == tokens
    assert image(data(name), CFG_25).num_tokens == tokens_25


def test_grey_and_rgb_copies_are_the_same_medium() -> None:
    grey, rgb = image(data("gray8.png")), image(encode(np.full((64, 64, 3), 77, np.uint8)))
    assert np.array_equal(grey.patches_PW, rgb.patches_PW)
    assert grey.digest == rgb.digest


def test_turned_images_have_a_turned_grid() -> None:
    assert image(data("exif6_640x480.jpg")).grid_thw == (1, 40, 30)


def test_size_is_refused_before_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "load_rgb", lambda *_, **__: pytest.fail("decoded"))
    file = encode(np.zeros((4_000, 4_000, 3), np.uint8), "JPEG")
    limits = MediaLimits(max_frame_patches=10_000)
    with pytest.raises(MediaTooLargeError, match=r"62500 patches.*10000 patches"):
        process_image(file, CFG, limits, {}, param=PARAM)
    with pytest.raises(MediaError, match="200 times"):
        image(encode(np.zeros((1, 4_000, 3), np.uint8)))
    with pytest.raises(MediaError, match="multiples of 32"):
        image(encode(np.zeros((64, 65, 3), np.uint8)), do_resize=False)


def test_options_reach_the_resize() -> None:
    file = data("s_1000x1000.png")
    assert image(file, max_pixels=256 * 1_024).num_tokens == 256
    assert image(file, max_pixels=1e12).num_tokens == 961
    with pytest.raises(MediaError, match="option max_pixel is not an option"):
        image(file, max_pixel=5)


def test_video_carries_a_time_per_group() -> None:
    file = make_video(solid_frames(range(240)))
    media = process_video(file, CFG, LIMITS, {"fps": 2}, param=PARAM)
    assert media.kind == "video"
    assert media.grid_thw == (8, 4, 4)
    assert media.num_tokens == 8 * media.tokens_per_frame == 32
    assert len(media.timestamps_s) == 8
    assert media.patches_PW.shape == (128, 1_536)


def test_already_resized_frames_keep_their_grid() -> None:
    frames = [encode(frame, "BMP") for frame in solid_frames(range(60), 480, 832)]
    limits = replace(LIMITS, max_bytes=1 << 30)
    media = process_video(frames, CFG, limits, {"do_resize": False}, param=PARAM)
    assert media.grid_thw == (30, 30, 52)
    assert media.num_tokens == 11_700
    levels = media.patches_PW.reshape(30, 1_560, 3, 2, 256)[:, 0, 0, :, 0]
    assert levels.ravel().tolist() == list(range(60))


def test_digest_covers_shape() -> None:
    patches = np.zeros((2, 1_536), np.uint8)
    patches = np.repeat(patches, 30, axis=0)
    digests = {
        media_digest("image", patches, grid, CFG) for grid in ((1, 6, 10), (1, 10, 6), (15, 2, 2))
    }
    assert len(digests) == 3
    wide, tall = (image(data(f"samebytes_{name}.png")) for name in ("150x30", "30x150"))
    assert wide.digest != tall.digest


def test_digest_covers_everything_else() -> None:
    patches = np.arange(4 * 1_536, dtype=np.uint64).astype(np.uint8).reshape(4, -1)
    base = media_digest("video", patches, (1, 2, 2), CFG, (0.5,))
    assert base == media_digest("video", patches.copy(), (1, 2, 2), CFG, (0.5,))
    changed = patches.copy()
    changed[3, 1_535] ^= 1
    others = [
        media_digest("image", patches, (1, 2, 2), CFG, (0.5,)),
        media_digest("video", changed, (1, 2, 2), CFG, (0.5,)),
        media_digest("video", patches, (1, 2, 2), CFG, (0.25,)),
        media_digest("video", patches, (1, 2, 2), CFG, ()),
        media_digest("video", patches, (1, 2, 2), replace(CFG, mean=(0.5, 0.5, 0.4)), (0.5,)),
        media_digest("video", patches, (1, 2, 2), replace(CFG, std=(0.5, 0.5, 0.4)), (0.5,)),
        media_digest("video", patches, (1, 2, 2), replace(CFG, merge_size=1), (0.5,)),
    ]
    assert len({base, *others}) == len(others) + 1


def test_threads_do_not_disturb_each_other() -> None:
    files = [data("exif6.jpg"), data("palette_trns.png"), data("gray16_ramp.png"), data("la.png")]
    videos = [make_video(solid_frames(range(first, first + 40))) for first in (0, 100)]
    alone = [image(file).digest for file in files]
    alone += [process_video(file, CFG, LIMITS, {}, param=PARAM).digest for file in videos]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(image, file) for _ in range(6) for file in files]
        runs = [
            pool.submit(process_video, file, CFG, LIMITS, {}, param=PARAM)
            for _ in range(6)
            for file in videos
        ]
        assert [job.result().digest for job in jobs] == alone[:4] * 6
        assert [run.result().digest for run in runs] == alone[4:] * 6


def test_one_bad_image_leaves_the_next_one_alone() -> None:
    for name in ("trunc.jpg", "trunc.png", "bomb_20000.png", "fake.heic", "x.svg"):
        with pytest.raises(MediaError) as caught:
            image(data(name))
        assert caught.value.param == PARAM
        assert caught.value.__cause__ is None
        assert image(data("good.jpg")).num_tokens > 0
