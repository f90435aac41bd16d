"""Videos, as files or as lists of pictures, to sampled frames of their final size."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import MediaTooLargeError
from tpu_vl.vision.container import VideoFile
from tpu_vl.vision.decode import decode_image
from tpu_vl.vision.options import VideoOptions
from tpu_vl.vision.resize import MediaPlan, plan_video, resize_frame
from tpu_vl.vision.sniff import media_error

logger = logging.getLogger(__name__)

DEFAULT_LIST_FPS = 24.0
"""Rate of a frame list whose client declares none, as in transformers."""

_FILE_ONLY = ("num_frames", "max_frames", "video_start", "video_end")


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledVideo:
    """Frames of a video, ready to be cut into patches; always whole temporal groups.

    Args:
        frames_THWC: uint8, upright, resized to the plan's size.
        plan: the grid; `T = grid_t * temporal_patch_size`.
        indices: T numbers of the frames in the source, from its first frame.
        fps: frames per second of the source; of a file of variable rate the mean.
        timestamps_s: per temporal group, the mean of the times of its first and last frame.
    """

    frames_THWC: np.ndarray
    plan: MediaPlan
    indices: tuple[int, ...]
    fps: float
    timestamps_s: tuple[float, ...]


def read_video(
    data: bytes | Sequence[bytes],
    cfg: ProcessorConfig,
    limits: MediaLimits,
    options: VideoOptions,
    *,
    param: str,
) -> SampledVideo:
    """Decodes, samples, turns upright and resizes a video.

    Only the sampled frames are kept, each resized as soon as it is decoded.

    Args:
        data: an MP4, MOV, WebM, MKV, AVI or GIF file; or encoded pictures, the frames in order,
            which are all used (no resampling).
        cfg: geometry and sampling rule.
        limits: `max_bytes`, `max_pixels`, `max_video_frames`, `max_decoded_frames` and the patch
            limits apply; frames are counted before any is decoded.
        options: what the client asked for.
        param: path of the part in the request.

    Raises:
        MediaError: not a video, empty, without a video stream, cut off or damaged beyond use.
        MediaTooLargeError: over a limit.

    Source: sample_frames of Qwen3VLVideoProcessor and _calculate_timestamps of Qwen3VLProcessor,
    transformers 5.24. Deviations: more `num_frames` than there are gives all there are; times of
    a variable-rate file are its presentation times; an unreadable frame is replaced by its
    nearest neighbour and logged.
    """
    parts = [data] if isinstance(data, bytes) else data
    num_bytes = sum(len(part) for part in parts)
    if num_bytes > limits.max_bytes:
        raise MediaTooLargeError(
            f"{param}: the video has {num_bytes} bytes, over the limit of {limits.max_bytes}",
            param=param,
        )
    if isinstance(data, bytes):
        return _read_file(data, cfg, limits, options, param)
    return _read_list(data, cfg, limits, options, param)


def timestamp_text(time_s: float) -> str:
    """The text that Qwen3-VL reads in front of a temporal group.

    Args:
        time_s: its timestamp in seconds.
    """
    return f"<{time_s:.1f} seconds>"


def sample_indices(
    times_s: np.ndarray,
    fps: float,
    cfg: ProcessorConfig,
    limits: MediaLimits,
    options: VideoOptions,
    *,
    param: str,
) -> np.ndarray:
    """Which frames of a file are used.

    Args:
        times_s: float64 presentation time of every frame, from 0, ascending.
        fps: of the source.
        cfg: `video_fps`, `video_min_frames`, `video_max_frames`.
        limits: `max_video_frames`.
        options: `fps` or `num_frames`, `max_frames`, `video_start`, `video_end`.
        param: path of the part in the request.

    Returns:
        int64 frame numbers from the file's first frame, ascending, at least one.

    Raises:
        MediaError: no frame lies between `video_start` and `video_end`.
    """
    first, last = 0, len(times_s) - 1
    margin = 0.01 / fps  # a cut at 2.0 s includes the frame whose time is 2.0 but for rounding
    if options.video_start is not None:
        first = int(np.searchsorted(times_s, options.video_start - margin))
    if options.video_end is not None:
        last = int(np.searchsorted(times_s, options.video_end + margin)) - 1
    total = last - first + 1
    if total < 1:
        raise media_error(
            param,
            f"no frame lies between video_start {options.video_start} s and video_end "
            f"{options.video_end} s; the video ends at {times_s[-1]:.2f} s",
        )
    cap = min(cfg.video_max_frames, limits.max_video_frames)
    if options.num_frames is not None:
        wanted = options.num_frames
    else:
        target = cfg.video_fps if options.fps is None else options.fps
        wanted = max(int(min(total / fps * target, 2.0**31)), cfg.video_min_frames)
    count = min(wanted, options.max_frames or cap, cap, total)
    return np.linspace(first, last, count).round().astype(np.int64)


def group_times(times_s: Sequence[float], temporal: int) -> tuple[float, ...]:
    """Timestamp of every temporal group.

    Args:
        times_s: of every frame; whole groups.
        temporal: frames per group.
    """
    return tuple(
        (times_s[i] + times_s[i + temporal - 1]) / 2 for i in range(0, len(times_s), temporal)
    )


def _read_file(
    data: bytes, cfg: ProcessorConfig, limits: MediaLimits, options: VideoOptions, param: str
) -> SampledVideo:
    if options.frames_indices is not None:
        raise media_error(param, "option frames_indices goes with a frame list, not with a file")
    with VideoFile(data, limits, param=param) as file:
        indices = sample_indices(file.times_s, file.fps, cfg, limits, options, param=param)
        times = [float(t) for t in file.times_s[indices]]
        frames = _Frames(len(indices), cfg, limits, options, param)
        wanted = {int(index): slot for slot, index in enumerate(indices)}
        for index, rgb_HWC in file.frames(indices):
            frames.put(wanted[index], rgb_HWC)
        return frames.finish(indices.tolist(), times, file.fps)


def _read_list(
    parts: Sequence[bytes],
    cfg: ProcessorConfig,
    limits: MediaLimits,
    options: VideoOptions,
    param: str,
) -> SampledVideo:
    cap = min(cfg.video_max_frames, limits.max_video_frames)
    if not parts:
        raise media_error(param, "the video is an empty list of frames")
    if len(parts) > cap:
        raise MediaTooLargeError(
            f"{param}: the video has {len(parts)} frames, over the limit of {cap}; send fewer",
            param=param,
        )
    for name in _FILE_ONLY:
        if getattr(options, name) is not None:
            raise media_error(
                param, f"option {name} goes with a video file; all frames of a list are used"
            )
    indices = options.frames_indices or tuple(range(len(parts)))
    if len(indices) != len(parts):
        raise media_error(
            param, f"option frames_indices has {len(indices)} numbers for {len(parts)} frames"
        )
    fps = options.fps or DEFAULT_LIST_FPS
    frames = _Frames(len(parts), cfg, limits, options, param)
    size: tuple[int, ...] | None = None
    for slot, part in enumerate(parts):
        rgb_HWC = decode_image(part, limits, param=f"{param}.[{slot}]")
        size = size or rgb_HWC.shape
        if rgb_HWC.shape != size:
            raise media_error(
                f"{param}.[{slot}]",
                f"the frame is {rgb_HWC.shape[1]} x {rgb_HWC.shape[0]} pixels, the first one "
                f"{size[1]} x {size[0]}; frames of one video have one size",
            )
        frames.put(slot, rgb_HWC)
    return frames.finish(list(indices), [index / fps for index in indices], fps)


class _Frames:
    """The frames kept of one video; its size is settled by the first frame put in."""

    def __init__(
        self,
        count: int,
        cfg: ProcessorConfig,
        limits: MediaLimits,
        options: VideoOptions,
        param: str,
    ) -> None:
        self.count, self.cfg, self.limits, self.options = count, cfg, limits, options
        self.param = param
        self.filled = np.zeros(count, bool)
        self.plan: MediaPlan | None = None
        self.frames_THWC = np.empty((0, 0, 0, 3), np.uint8)

    def put(self, slot: int, rgb_HWC: np.ndarray) -> None:
        if self.plan is None:
            height, width, _ = rgb_HWC.shape
            self.plan = plan_video(
                self.count, height, width, self.cfg, self.limits, self.options, param=self.param
            )
            num_frames = self.plan.grid_thw[0] * self.cfg.temporal_patch_size
            shape = (num_frames, self.plan.height, self.plan.width, 3)
            self.frames_THWC = np.empty(shape, np.uint8)
        self.frames_THWC[slot] = resize_frame(rgb_HWC, self.plan.height, self.plan.width)
        self.filled[slot] = True

    def finish(self, indices: list[int], times_s: list[float], fps: float) -> SampledVideo:
        if self.plan is None:
            raise media_error(self.param, "no frame of the video can be decoded")
        present = np.flatnonzero(self.filled)
        for slot in np.flatnonzero(~self.filled):
            neighbour = present[np.argmin(np.abs(present - slot))]
            logger.warning(
                "%s: frame %d cannot be decoded; frame %d stands in for it",
                self.param,
                indices[slot],
                indices[neighbour],
            )
            self.frames_THWC[slot] = self.frames_THWC[neighbour]
        missing = len(self.frames_THWC) - self.count
        self.frames_THWC[self.count :] = self.frames_THWC[self.count - 1]
        indices, times_s = indices + indices[-1:] * missing, times_s + times_s[-1:] * missing
        return SampledVideo(
            frames_THWC=self.frames_THWC,
            plan=self.plan,
            indices=tuple(indices),
            fps=fps,
            timestamps_s=group_times(times_s, self.cfg.temporal_patch_size),
        )
