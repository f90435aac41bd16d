"""Grids, token counts and pixels against transformers' processors, and the rules around them.

Oracles: `Qwen2VLImageProcessorPil` (the PIL backend) for pictures, byte for byte;
`Qwen3VLVideoProcessor` (torchvision, the only backend it has) for videos, grids exactly and
pixels within the bound measured here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.vision.synth import CFG, CFG_25, FREE, LIMITS, PARAM
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.vision import resize
from tpu_vl.vision.options import ImageOptions, VideoOptions
from tpu_vl.vision.resize import (
    MediaPlan,
    patchify,
    plan_image,
    plan_video,
    resize_frame,
    resize_image,
)

NEEDS_TORCH = "transformers' processors, the oracle, need torch"


def image_plan(
    height: int,
    width: int,
    cfg: ProcessorConfig = CFG,
    limits: MediaLimits = FREE,
    **options: object,
) -> MediaPlan:
    parsed = ImageOptions.parse(options, cfg, param=PARAM)
    return plan_image(height, width, cfg, limits, parsed, param=PARAM)


def video_plan(
    num_frames: int,
    height: int,
    width: int,
    cfg: ProcessorConfig = CFG,
    limits: MediaLimits = FREE,
    **options: object,
) -> MediaPlan:
    parsed = VideoOptions.parse(options, cfg, param=PARAM)
    return plan_video(num_frames, height, width, cfg, limits, parsed, param=PARAM)


def image_patches(rgb: np.ndarray, plan: MediaPlan) -> np.ndarray:
    return patchify(resize_image(rgb, plan.height, plan.width)[None], plan, 2)


def video_patches(frames: np.ndarray, plan: MediaPlan) -> np.ndarray:
    resized = [resize_frame(frame, plan.height, plan.width) for frame in frames]
    resized += resized[-1:] * (len(resized) % 2)
    return patchify(np.stack(resized), plan, 2)


def as_uint8(pixels: Any, cfg: ProcessorConfig) -> np.ndarray:
    """Undoes the normalisation of [P, W] pixels, channel by channel."""
    values = pixels.numpy().reshape(len(pixels), 3, -1)
    mean, std = (np.array(x)[None, :, None] for x in (cfg.mean, cfg.std))
    return np.rint((values * std + mean) * 255).astype(np.uint8).reshape(len(pixels), -1)


def image_processor(name: str, cfg: ProcessorConfig) -> Any:
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    if name == "pil":
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

        factory = module.Qwen2VLImageProcessorPil
    else:
        from transformers.models.qwen2_vl import image_processing_qwen2_vl as module

        factory = module.Qwen2VLImageProcessor
    return factory(
        size={"shortest_edge": cfg.image_min_pixels, "longest_edge": cfg.image_max_pixels},
        patch_size=cfg.patch_size,
        image_mean=list(cfg.mean),
        image_std=list(cfg.std),
    )


def video_processor(cfg: ProcessorConfig) -> Any:
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    return Qwen3VLVideoProcessor(
        size={"shortest_edge": cfg.video_min_pixels, "longest_edge": cfg.video_max_pixels},
        patch_size=cfg.patch_size,
        image_mean=list(cfg.mean),
        image_std=list(cfg.std),
        cap_pixels_per_frame=False,
    )


def photographs() -> list[np.ndarray]:
    skimage = pytest.importorskip("skimage", reason="photographs come with scikit-image")
    folder = Path(skimage.__file__).parent / "data"
    names = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png")
    pictures = []
    for name in names:
        with Image.open(folder / name) as image:
            pictures.append(np.asarray(image.convert("RGB")))
    return pictures


def random_size(rng: np.random.Generator, low: int, high: int) -> tuple[int, int]:
    while True:
        height, width = (int(x) for x in np.exp(rng.uniform(np.log(low), np.log(high), 2)))
        if max(height, width) / min(height, width) <= 200:
            return height, width


def random_picture(
    rng: np.random.Generator, photos: list[np.ndarray], low: int, high: int
) -> np.ndarray:
    """Noise, hard edges or part of a photograph, of a random size."""
    height, width = random_size(rng, low, high)
    kind = int(rng.integers(3))
    if kind == 0:
        return rng.integers(0, 256, (height, width, 3), np.uint8)
    if kind == 1:
        return rng.integers(0, 2, (height, width, 3), np.uint8) * np.uint8(255)
    return np.ascontiguousarray(photos[int(rng.integers(len(photos)))][:height, :width])


OTHER_CFG = ProcessorConfig(
    image_min_pixels=4_096,
    image_max_pixels=128 * 1_024,
    video_min_pixels=16_384,
    video_max_pixels=512 * 1_024,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)


@pytest.mark.parametrize(("cfg", "count"), [(CFG, 120), (OTHER_CFG, 80), (CFG_25, 20)])
def test_images_equal_the_pil_backend(cfg: ProcessorConfig, count: int) -> None:
    processor = image_processor("pil", cfg)
    rng, photos = np.random.default_rng(count), photographs()
    for _ in range(count):
        rgb = random_picture(rng, photos, 2, 500)
        plan = image_plan(rgb.shape[0], rgb.shape[1], cfg)
        expected = processor(Image.fromarray(rgb), return_tensors="pt")
        assert plan.grid_thw == tuple(expected["image_grid_thw"][0].tolist()), rgb.shape
        assert plan.num_patches == processor.get_number_of_image_patches(*rgb.shape[:2])
        patches = image_patches(rgb, plan)
        assert patches.flags.c_contiguous
        assert np.array_equal(patches, as_uint8(expected["pixel_values"], cfg)), rgb.shape


def test_grids_equal_over_many_sizes() -> None:
    image, video = image_processor("pil", CFG), video_processor(CFG)
    rng = np.random.default_rng(1)
    for _ in range(2_000):
        height, width = random_size(rng, 1, 9_000)
        frames = int(rng.integers(2, 769))
        plan = image_plan(height, width)
        assert plan.num_patches == image.get_number_of_image_patches(height, width)
        expected = video.get_num_of_video_patches(frames, height, width)
        assert video_plan(frames, height, width).num_patches == expected


@pytest.mark.parametrize(("cfg", "count"), [(CFG, 40), (OTHER_CFG, 20)])
def test_videos_equal_transformers(cfg: ProcessorConfig, count: int) -> None:
    processor = video_processor(cfg)
    torch = pytest.importorskip("torch")

    rng, photos = np.random.default_rng(count), photographs()
    for _ in range(count):
        rgb = random_picture(rng, photos, 8, 500)
        frames = np.stack([np.roll(rgb, i, axis=1) for i in range(int(rng.integers(2, 8)))])
        num_frames, height, width, _ = frames.shape
        plan = video_plan(num_frames, height, width, cfg)
        expected = processor(
            [torch.from_numpy(frames).permute(0, 3, 1, 2)],
            do_sample_frames=False,
            return_tensors="pt",
        )
        assert plan.grid_thw == tuple(expected["video_grid_thw"][0].tolist()), frames.shape
        oracle = as_uint8(expected["pixel_values_videos"], cfg)
        assert np.array_equal(video_patches(frames, plan), oracle), frames.shape


def test_frames_equal_torchvision_and_pillow_does_not() -> None:
    torch = pytest.importorskip("torch")
    tv = pytest.importorskip("torchvision.transforms.v2.functional")
    rng, seen_by_pillow = np.random.default_rng(9), 0
    for _ in range(60):
        rgb = rng.integers(0, 2, (*rng.integers(1, 700, 2), 3), np.uint8) * np.uint8(255)
        height, width = (32 * int(n) for n in rng.integers(1, 20, 2))
        expected = tv.resize(
            torch.from_numpy(rgb).permute(2, 0, 1)[None],
            [height, width],
            interpolation=tv.InterpolationMode.BICUBIC,
            antialias=True,
        )[0].permute(1, 2, 0)
        assert np.array_equal(resize_frame(rgb, height, width), expected.numpy()), rgb.shape
        seen_by_pillow += not np.array_equal(resize_image(rgb, height, width), expected.numpy())
    assert seen_by_pillow > 30, "the comparison must be able to fail"


def test_video_patch_layout_is_exact() -> None:
    processor = video_processor(CFG)
    torch = pytest.importorskip("torch")

    rng = np.random.default_rng(5)
    for grid in ((2, 1, 3), (5, 2, 2), (8, 4, 1)):
        frames = rng.integers(0, 256, (grid[0], grid[1] * 32, grid[2] * 32, 3), np.uint8)
        expected = processor(
            [torch.from_numpy(frames).permute(0, 3, 1, 2)],
            do_sample_frames=False,
            do_resize=False,
            return_tensors="pt",
        )
        num_frames, height, width, _ = frames.shape
        plan = video_plan(num_frames, height, width, do_resize=False)
        oracle = as_uint8(expected["pixel_values_videos"], CFG)
        assert np.array_equal(video_patches(frames, plan), oracle)


@pytest.mark.parametrize("swap", [(0, 1, 2, 4, 3), (0, 2, 1, 3, 4), (0, 1, 2, 3, 4)])
def test_the_layout_test_sees_a_planted_mutation(swap: tuple[int, ...]) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    plan = image_plan(64, 64, min_pixels=1)
    patches = patchify(rgb[None], plan, 2).reshape(16, 3, 2, 16, 16)
    mutant = patches.transpose(swap).reshape(16, -1) if swap != (0, 1, 2, 3, 4) else patches[::-1]
    expected = image_processor("pil", ProcessorConfig(image_min_pixels=1))(
        Image.fromarray(rgb), return_tensors="pt"
    )
    oracle = as_uint8(expected["pixel_values"], CFG)
    assert np.array_equal(patches.reshape(16, -1), oracle)
    assert not np.array_equal(mutant.reshape(16, -1), oracle)


def test_pixels_are_near_the_torchvision_backend() -> None:
    rng = np.random.default_rng(11)
    coarse = rng.integers(0, 256, (57, 86, 3), np.uint8)
    edges = np.asarray(Image.fromarray(coarse).resize((2048, 1365), Image.Resampling.NEAREST))
    rgb = np.clip(edges + rng.normal(0, 8, edges.shape), 0, 255).astype(np.uint8)
    plan = image_plan(1365, 2048, CFG_25)
    assert plan.grid_thw == (1, 98, 146)
    assert plan.num_tokens == 3_577
    expected = image_processor("torchvision", CFG_25)(Image.fromarray(rgb), return_tensors="pt")
    oracle = as_uint8(expected["pixel_values"], CFG_25).astype(int)
    difference = np.abs(image_patches(rgb, plan) - oracle).mean() / 255 / CFG_25.std[0]
    assert difference < 0.005


@pytest.mark.parametrize(
    ("cfg", "height", "width", "size", "tokens"),
    [
        (CFG_25, 29, 27, (84, 56), 6),
        (CFG, 29, 27, (288, 256), 72),
        (CFG_25, 16, 16, (56, 56), 4),
        (CFG_25, 1, 1, (56, 56), 4),
        (CFG, 16, 16, (256, 256), 64),
        (CFG, 1, 1, (256, 256), 64),
        (CFG_25, 336, 448, (336, 448), 192),
        (CFG, 336, 448, (320, 448), 140),
        (CFG, 1000, 1000, (992, 992), 961),
        (CFG, 200, 300, None, 70),
    ],
)
def test_published_sizes(
    cfg: ProcessorConfig, height: int, width: int, size: tuple[int, int] | None, tokens: int
) -> None:
    plan = image_plan(height, width, cfg)
    assert plan.num_tokens == tokens
    assert size is None or (plan.height, plan.width) == size


def test_no_padding_is_added() -> None:
    rgb = np.full((336, 448, 3), 200, np.uint8)
    assert np.all(image_patches(rgb, image_plan(336, 448)) == 200)


def test_the_floor_may_lead_over_max_pixels_and_the_grid_counts() -> None:
    twenty = ProcessorConfig(patch_size=14, image_min_pixels=3_136, image_max_pixels=20 * 784)
    plan = image_plan(5_600, 28, twenty)
    assert (plan.height, plan.width, plan.num_tokens) == (1_764, 28, 63)
    capped = ProcessorConfig(image_max_pixels=64 * 1_024)
    assert image_plan(5, 1_000, capped).num_tokens == 114
    assert image_plan(100, 200, capped).num_tokens == 72
    limits = MediaLimits(max_frame_patches=64 * 4)
    with pytest.raises(MediaTooLargeError, match=r"456 patches.*256 patches"):
        image_plan(5, 1_000, capped, limits)
    assert image_plan(5, 1_000, capped, MediaLimits(max_frame_patches=456)).num_patches == 456


def test_request_budget_counts_all_frames() -> None:
    plan = video_plan(16, 360, 640)
    assert plan.num_tokens == 1_760
    exact = MediaLimits(max_request_patches=plan.num_patches)
    assert video_plan(16, 360, 640, CFG, exact) == plan
    with pytest.raises(MediaTooLargeError, match=r"7040 patches.*7039 patches"):
        video_plan(16, 360, 640, CFG, MediaLimits(max_request_patches=7_039))


def test_a_request_cap_lowers_the_count_that_admission_sees() -> None:
    capped = video_plan(16, 360, 640, max_pixels=16 * 360 * 640 // 2)
    assert capped.num_tokens < 1_760


def test_server_limits_hold_for_every_image() -> None:
    server = ProcessorConfig(patch_size=14, image_min_pixels=3_136, image_max_pixels=256 * 784)
    plans = [image_plan(1_080, 1_920, server) for _ in range(2)]
    assert [(p.height, p.width, p.num_tokens) for p in plans] == [(336, 588, 252)] * 2


def test_video_budget_is_per_video_without_a_cap_per_frame() -> None:
    long = ProcessorConfig(video_max_pixels=469_762_048)
    assert video_plan(180, 1_080, 1_920, long).num_tokens == 183_600
    assert video_plan(768, 1_080, 1_920, long).num_tokens == 221_184
    # The budget counts the pixels of sampled frames: frames * height * width.
    budget = ProcessorConfig(video_max_pixels=224_000 * 32 * 32 * 2)
    assert 200_000 < video_plan(768, 1_080, 1_920, budget).num_tokens <= 224_000


def test_default_budget_of_sixty_frames() -> None:
    plan = video_plan(60, 720, 1_280)
    assert (plan.height, plan.width) == (480, 832)
    assert plan.grid_thw == (30, 30, 52)
    assert plan.num_tokens == 11_700
    assert video_plan(60, 480, 832, do_resize=False) == plan


def test_do_resize_false_needs_whole_cells() -> None:
    assert image_plan(64, 96, do_resize=False).grid_thw == (1, 4, 6)
    with pytest.raises(MediaError, match="multiples of 32"):
        image_plan(64, 95, do_resize=False)
    with pytest.raises(MediaError, match="multiples of 32"):
        video_plan(2, 63, 96, do_resize=False)


def test_one_frame_fills_its_group_before_the_resize() -> None:
    plan = video_plan(1, 256, 256)
    assert plan.grid_thw == (1, 16, 16)
    assert plan.num_tokens == 64


def test_too_thin() -> None:
    for height, width in ((1, 4_000), (4_000, 1), (32, 6_401)):
        with pytest.raises(MediaError, match="200 times"):
            image_plan(height, width)
        with pytest.raises(MediaError, match="200 times"):
            video_plan(4, height, width)
    assert image_plan(1, 200).num_tokens > 0


def test_admission_and_work_share_one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.vision.synth import encode
    from tpu_vl.vision.process import process_image

    rule: Callable[..., tuple[int, int]] = resize.smart_resize_image
    calls: list[tuple[int, ...]] = []

    def counted(*args: int) -> tuple[int, int]:
        calls.append(args)
        return rule(*args)

    monkeypatch.setattr(resize, "smart_resize_image", counted)
    file = encode(np.zeros((200, 300, 3), np.uint8))
    media = process_image(file, CFG, LIMITS, {}, param=PARAM)
    assert calls == [(200, 300, 32, 65_536, 16_777_216)] * 2
    assert media.plan == image_plan(200, 300)
    assert media.num_tokens == 70


@settings(max_examples=300, deadline=None)
@given(
    height=st.integers(1, 20_000),
    width=st.integers(1, 20_000),
    low=st.integers(1, 1 << 22),
    span=st.integers(0, 1 << 24),
)
def test_every_grid_is_whole_cells(height: int, width: int, low: int, span: int) -> None:
    cfg = ProcessorConfig(image_min_pixels=low, image_max_pixels=low + span)
    if max(height, width) > 200 * min(height, width):
        return
    plan = image_plan(height, width, cfg)
    assert plan.height % 32 == plan.width % 32 == 0
    assert plan.num_tokens * 4 == plan.num_patches > 0


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_frame_passes_run_along_rows_first(order: str) -> None:
    rng = np.random.default_rng(2)
    rgb = rng.integers(0, 2, (300, 33, 3), np.uint8) * np.uint8(255)
    first = (300, 32) if order == "rows" else (288, 33)
    two_passes = resize_frame(resize_frame(rgb, *first), 288, 32)
    assert np.array_equal(resize_frame(rgb, 288, 32), two_passes) == (order == "rows")
