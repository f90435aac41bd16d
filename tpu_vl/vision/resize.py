"""How large a picture or a video becomes, in pixels, patches and tokens; and the resize itself."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import MediaTooLargeError
from tpu_vl.vision.bicubic import resize_uint8
from tpu_vl.vision.options import ImageOptions, VideoOptions
from tpu_vl.vision.sniff import media_error

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True)
class MediaPlan:
    """The grid that a medium will have: admission, budgets and the work itself read it here.

    Args:
        grid_thw: temporal groups, rows and columns of patches.
        patch_size: pixels per side of a patch.
        merge_size: patches per side of a merged cell.
    """

    grid_thw: tuple[int, int, int]
    patch_size: int
    merge_size: int

    @property
    def height(self) -> int:
        """Pixels after resizing."""
        return self.grid_thw[1] * self.patch_size

    @property
    def width(self) -> int:
        """Pixels after resizing."""
        return self.grid_thw[2] * self.patch_size

    @property
    def num_patches(self) -> int:
        """Of all frames."""
        return math.prod(self.grid_thw)

    @property
    def tokens_per_frame(self) -> int:
        """Placeholder tokens of one temporal group."""
        return self.grid_thw[1] * self.grid_thw[2] // self.merge_size**2

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens of all temporal groups."""
        return self.grid_thw[0] * self.tokens_per_frame


def plan_image(
    height: int,
    width: int,
    cfg: ProcessorConfig,
    limits: MediaLimits,
    options: ImageOptions,
    *,
    param: str,
) -> MediaPlan:
    """The grid of a picture.

    Args:
        height, width: decoded size in pixels, >= 1.
        cfg: geometry.
        limits: `max_frame_patches` and `max_request_patches` apply to the grid as it comes out.
        options: bounds of the resize.
        param: path of the part in the request.

    Raises:
        MediaError: sides in a ratio over 200, or not multiples of a cell with do_resize=false.
        MediaTooLargeError: the grid is over a limit; both numbers are quoted.

    Source: smart_resize in transformers 5.24 models/qwen2_vl/image_processing_qwen2_vl.py.
    Deviation: the one-cell floor may lead over `max_pixels` as it does there; the limits are
    checked on the grid, never on `max_pixels`.
    """
    check_aspect(height, width, param=param)
    if options.do_resize:
        height, width = smart_resize_image(
            height, width, cfg.factor, options.min_pixels, options.max_pixels
        )
    else:
        _check_multiple(height, width, cfg.factor, param)
    return _plan(1, height, width, cfg, limits, param)


def plan_video(
    num_frames: int,
    height: int,
    width: int,
    cfg: ProcessorConfig,
    limits: MediaLimits,
    options: VideoOptions,
    *,
    param: str,
) -> MediaPlan:
    """The grid of a video.

    Args:
        num_frames: sampled frames, >= 1, before they are filled up to whole temporal groups.
        height, width: upright frame size in pixels, >= 1.
        cfg, limits, options, param: as for `plan_image`.

    Raises:
        MediaError, MediaTooLargeError: as for `plan_image`.

    Source: Qwen3VLVideoProcessor.resize and smart_resize in transformers 5.24
    models/qwen3_vl/video_processing_qwen3_vl.py, without the per-frame cap (its default).
    Deviation: frames short of one temporal group count as a full group; they are refused there.
    """
    temporal = cfg.temporal_patch_size
    if options.do_resize:
        check_aspect(height, width, param=param)
        height, width = smart_resize_video(
            max(num_frames, temporal),
            height,
            width,
            temporal,
            cfg.factor,
            options.min_pixels,
            options.max_pixels,
        )
    else:
        _check_multiple(height, width, cfg.factor, param)
    return _plan(-(-num_frames // temporal), height, width, cfg, limits, param)


def check_aspect(height: int, width: int, *, param: str) -> None:
    """Refuses pictures so thin that the resize rule is not defined for them.

    Raises:
        MediaError: the longer side is more than 200 times the shorter one.
    """
    if min(height, width) < 1 or max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise media_error(
            param,
            f"{width} x {height} pixels: the longer side is over {MAX_ASPECT_RATIO} times the "
            "shorter one; crop or pad it",
        )


def smart_resize_image(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width as multiples of `factor` near the bounds; see `plan_image`."""
    rounded = round(height / factor) * factor, round(width / factor) * factor
    area = rounded[0] * rounded[1]
    return _into_bounds(
        height, width, rounded, area, height * width, factor, min_pixels, max_pixels
    )


def smart_resize_video(
    num_frames: int,
    height: int,
    width: int,
    temporal: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Height and width of every frame as multiples of `factor`; see `plan_video`."""
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    rounded = round(height / factor) * factor, round(width / factor) * factor
    volume = round(num_frames / temporal) * temporal * rounded[0] * rounded[1]
    exact = num_frames * height * width
    return _into_bounds(height, width, rounded, volume, exact, factor, min_pixels, max_pixels)


def _into_bounds(
    height: int,
    width: int,
    rounded: tuple[int, int],
    rounded_volume: int,
    exact_volume: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    if rounded_volume > max_pixels:
        beta = math.sqrt(exact_volume / max_pixels)
        return (
            max(factor, math.floor(height / beta / factor) * factor),
            max(factor, math.floor(width / beta / factor) * factor),
        )
    if rounded_volume < min_pixels:
        beta = math.sqrt(min_pixels / exact_volume)
        return (
            math.ceil(height * beta / factor) * factor,
            math.ceil(width * beta / factor) * factor,
        )
    return rounded


def _check_multiple(height: int, width: int, factor: int, param: str) -> None:
    if height % factor or width % factor:
        raise media_error(
            param,
            f"{width} x {height} pixels with do_resize=false: both sides must be multiples of "
            f"{factor}; resize them or leave do_resize out",
        )


def _plan(
    grid_t: int, height: int, width: int, cfg: ProcessorConfig, limits: MediaLimits, param: str
) -> MediaPlan:
    grid = (grid_t, height // cfg.patch_size, width // cfg.patch_size)
    plan = MediaPlan(grid_thw=grid, patch_size=cfg.patch_size, merge_size=cfg.merge_size)
    frame_patches = grid[1] * grid[2]
    if frame_patches > limits.max_frame_patches:
        raise MediaTooLargeError(
            f"{param}: one frame becomes {width} x {height} pixels, {frame_patches} patches, over "
            f"the server's limit of {limits.max_frame_patches} patches; send it smaller or lower "
            "max_pixels",
            param=param,
        )
    if plan.num_patches > limits.max_request_patches:
        raise MediaTooLargeError(
            f"{param}: {grid_t} frames of {width} x {height} pixels are {plan.num_patches} "
            f"patches, over the server's limit of {limits.max_request_patches} patches per "
            "request; send fewer or smaller ones or lower max_pixels",
            param=param,
        )
    return plan


def resize_image(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes a picture by Pillow's antialiased bicubic filter.

    Args:
        rgb_HWC: uint8.
        height, width: target in pixels.

    Returns:
        uint8 [height, width, 3]; the input where it has that size already.

    Source: the PIL backend of transformers 5.24, Qwen2VLImageProcessorPil; equal byte for byte.
    """
    if rgb_HWC.shape[:2] == (height, width):
        return rgb_HWC
    image = Image.fromarray(rgb_HWC).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def resize_frame(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes a video frame by torch's antialiased bicubic filter.

    Args:
        rgb_HWC, height, width: as for `resize_image`.

    Returns:
        uint8 [height, width, 3]; the input where it has that size already.

    Source: Qwen3VLVideoProcessor of transformers 5.24, which resizes by torchvision; equal byte
    for byte. Pillow's filter has finer weights: it differs from this one by up to 2 levels.
    """
    if rgb_HWC.shape[:2] == (height, width):
        return rgb_HWC
    return resize_uint8(rgb_HWC, height, width)


def patchify(frames_THWC: np.ndarray, plan: MediaPlan, temporal_patch_size: int) -> np.ndarray:
    """Cuts frames into patches, merge blocks contiguous.

    Args:
        frames_THWC: uint8, of the plan's size; `grid_t * temporal_patch_size` frames, or one
            that fills its temporal group alone.
        plan: the grid.
        temporal_patch_size: frames per temporal group.

    Returns:
        uint8 [t * h * w, W], W running over channel, time, row and column inside the patch.

    Source: patchify of Qwen2VLImageProcessor and Qwen3VLVideoProcessor, transformers 5.24.
    """
    grid_t, grid_h, grid_w = plan.grid_thw
    size, merge = plan.patch_size, plan.merge_size
    num_frames = len(frames_THWC) // grid_t
    blocks = frames_THWC.reshape(
        grid_t, num_frames, grid_h // merge, merge, size, grid_w // merge, merge, size, 3
    ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    patches = np.empty((*blocks.shape[:6], temporal_patch_size, size, size), np.uint8)
    patches[...] = blocks
    return patches.reshape(plan.num_patches, -1)
