"""From the bytes a client sent to patches, grid and digest: all that the tower needs."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.types import MediaKind
from tpu_vl.vision.decode import load_rgb, open_image
from tpu_vl.vision.options import ImageOptions, VideoOptions
from tpu_vl.vision.resize import MediaPlan, patchify, plan_image, resize_image
from tpu_vl.vision.video import read_video


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedMedia:
    """One image or video, ready for a request.

    Args:
        kind: "image" or "video".
        plan: grid and geometry.
        patches_PW: uint8, C-contiguous; frame after frame, merge blocks contiguous; a patch runs
            over channel, time, row and column.
        digest: 32 bytes over all that decides the encoded rows and the prompt's text.
        timestamps_s: per temporal group of a video; () for an image.
    """

    kind: MediaKind
    plan: MediaPlan
    patches_PW: np.ndarray
    digest: bytes
    timestamps_s: tuple[float, ...] = ()

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """Temporal groups, rows and columns of patches."""
        return self.plan.grid_thw

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens of all temporal groups."""
        return self.plan.num_tokens

    @property
    def tokens_per_frame(self) -> int:
        """Placeholder tokens of one temporal group."""
        return self.plan.tokens_per_frame


def process_image(
    data: bytes,
    cfg: ProcessorConfig,
    limits: MediaLimits,
    options: Mapping[str, object],
    *,
    param: str,
) -> ProcessedMedia:
    """Decodes, resizes and cuts a picture into patches.

    Args:
        data: an encoded picture, see `decode_image`.
        cfg: geometry and resize bounds.
        limits: of bytes, pixels and patches.
        options: the client's, a subset of `options.IMAGE_OPTIONS`.
        param: path of the part in the request, for error messages.

    Raises:
        MediaError, MediaTooLargeError: the picture or an option is refused; nothing is kept.
    """
    settings = ImageOptions.parse(options, cfg, param=param)
    image = open_image(data, limits, param=param)
    # Every rule is symmetric in the two sides, so a size still to be turned decides early.
    plan_image(image.height, image.width, cfg, limits, settings, param=param)
    rgb_HWC = load_rgb(image, param=param)
    plan = plan_image(rgb_HWC.shape[0], rgb_HWC.shape[1], cfg, limits, settings, param=param)
    frames_THWC = resize_image(rgb_HWC, plan.height, plan.width)[None]
    return _processed("image", frames_THWC, plan, cfg)


def process_video(
    data: bytes | Sequence[bytes],
    cfg: ProcessorConfig,
    limits: MediaLimits,
    options: Mapping[str, object],
    *,
    param: str,
) -> ProcessedMedia:
    """Decodes, samples, resizes and cuts a video into patches.

    Args:
        data: a video file, or its frames as encoded pictures, see `read_video`.
        cfg: geometry, sampling rule and resize bounds.
        limits: of bytes, pixels, frames and patches.
        options: the client's, a subset of `options.VIDEO_OPTIONS`.
        param: path of the part in the request, for error messages.

    Raises:
        MediaError, MediaTooLargeError: the video or an option is refused; nothing is kept.
    """
    settings = VideoOptions.parse(options, cfg, param=param)
    video = read_video(data, cfg, limits, settings, param=param)
    return _processed("video", video.frames_THWC, video.plan, cfg, video.timestamps_s)


def media_digest(
    kind: MediaKind,
    patches_PW: np.ndarray,
    grid_thw: tuple[int, int, int],
    cfg: ProcessorConfig,
    timestamps_s: Sequence[float] = (),
) -> bytes:
    """SHA-256 over everything that decides a medium's encoded rows and its text.

    Args:
        kind: "image" or "video".
        patches_PW: uint8, C-contiguous.
        grid_thw: the grid; equal bytes in another shape are another medium.
        cfg: geometry, mean and std.
        timestamps_s: of a video.

    Returns:
        32 bytes. Fields are prefixed by their length, so no two lists of fields run together.
    """
    settings = (cfg.patch_size, cfg.temporal_patch_size, cfg.merge_size)
    fields = (
        kind.encode(),
        struct.pack("<3q", *grid_thw),
        struct.pack("<3q6d", *settings, *cfg.mean, *cfg.std),
        struct.pack(f"<{len(timestamps_s)}d", *timestamps_s),
        patches_PW.data,
    )
    state = hashlib.sha256(b"tpu-vl media v1")
    for field in fields:
        state.update(struct.pack("<q", memoryview(field).nbytes))
        state.update(field)
    return state.digest()


def _processed(
    kind: MediaKind,
    frames_THWC: np.ndarray,
    plan: MediaPlan,
    cfg: ProcessorConfig,
    timestamps_s: tuple[float, ...] = (),
) -> ProcessedMedia:
    patches_PW = patchify(frames_THWC, plan, cfg.temporal_patch_size)
    return ProcessedMedia(
        kind=kind,
        plan=plan,
        patches_PW=patches_PW,
        digest=media_digest(kind, patches_PW, plan.grid_thw, cfg, timestamps_s),
        timestamps_s=timestamps_s,
    )
