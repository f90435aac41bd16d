"""What a client may ask of the processor for one picture or video, validated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from tpu_vl.config import ProcessorConfig
from tpu_vl.errors import MediaError
from tpu_vl.vision.sniff import media_error

IMAGE_OPTIONS = frozenset({"min_pixels", "max_pixels", "do_resize"})
VIDEO_OPTIONS = IMAGE_OPTIONS | {
    "fps",
    "num_frames",
    "max_frames",
    "video_start",
    "video_end",
    "frames_indices",
}


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """How one picture is resized.

    Args:
        min_pixels, max_pixels: smart-resize bounds, height * width.
        do_resize: False takes the picture as it is; its sides must be multiples of a cell.
    """

    min_pixels: int
    max_pixels: int
    do_resize: bool = True

    @classmethod
    def parse(
        cls, raw: Mapping[str, object], cfg: ProcessorConfig, *, param: str
    ) -> "ImageOptions":
        """Reads a client's options.

        Args:
            raw: option -> value, a subset of `IMAGE_OPTIONS`; None counts as not given.
            cfg: gives the defaults and the cap of `max_pixels`.
            param: path of the part in the request.

        Raises:
            MediaError: an unknown option, or a value out of range, named.
        """
        reader = _Reader(raw, IMAGE_OPTIONS, param)
        low, high = reader.pixels(cfg.image_min_pixels, cfg.image_max_pixels)
        return cls(min_pixels=low, max_pixels=high, do_resize=reader.flag("do_resize", True))


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """How one video is sampled and resized.

    Args:
        min_pixels, max_pixels: smart-resize bounds, sampled frames * height * width.
        do_resize: False takes frames as they are; their sides must be multiples of a cell.
        fps: of a file: frames sampled per second; of a frame list: the rate it was taken at.
        num_frames: frames sampled, however long the video; not with `fps`.
        max_frames: the most frames sampled from a file; None, and above: the server's cap.
        video_start, video_end: part of the file used, in seconds from its first frame, both
            ends included; None: from the first, to the last frame.
        frames_indices: of a frame list: each frame's number in the source of rate `fps`.
    """

    min_pixels: int
    max_pixels: int
    do_resize: bool = True
    max_frames: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    frames_indices: tuple[int, ...] | None = None

    @classmethod
    def parse(
        cls, raw: Mapping[str, object], cfg: ProcessorConfig, *, param: str
    ) -> "VideoOptions":
        """Reads a client's options.

        Args:
            raw: option -> value, a subset of `VIDEO_OPTIONS`; None counts as not given.
            cfg: gives the defaults and the cap of `max_pixels`.
            param: path of the part in the request.

        Raises:
            MediaError: an unknown option, or a value out of range, named.
        """
        reader = _Reader(raw, VIDEO_OPTIONS, param)
        low, high = reader.pixels(cfg.video_min_pixels, cfg.video_max_pixels)
        fps, num_frames = reader.positive("fps"), reader.count("num_frames")
        if fps is not None and num_frames is not None:
            raise reader.error("num_frames", "cannot be given together with fps: leave one out")
        start, end = reader.seconds("video_start"), reader.seconds("video_end")
        if end is not None and end < (start or 0.0):
            raise reader.error("video_end", f"is {end} s, before video_start at {start or 0.0} s")
        return cls(
            min_pixels=low,
            max_pixels=high,
            do_resize=reader.flag("do_resize", True),
            max_frames=reader.count("max_frames"),
            fps=fps,
            num_frames=num_frames,
            video_start=start,
            video_end=end,
            frames_indices=reader.indices("frames_indices"),
        )


class _Reader:
    def __init__(self, raw: Mapping[str, object], known: frozenset[str], param: str) -> None:
        self.values = {name: value for name, value in raw.items() if value is not None}
        self.param = param
        if unknown := sorted(set(raw) - known):
            raise self.error(
                str(unknown[0])[:40], f"is not an option; accepted: {', '.join(sorted(known))}"
            )

    def error(self, name: str, reason: str) -> MediaError:
        return media_error(self.param, f"option {name} {reason}")

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise self.error(name, "must be a finite number")
        return float(value)

    def positive(self, name: str) -> float | None:
        value = self.number(name)
        if value is not None and value <= 0:
            raise self.error(name, f"is {value}, must be above 0")
        return value

    def count(self, name: str) -> int | None:
        value = self.number(name)
        if value is not None and (value < 1 or value != int(value)):
            raise self.error(name, f"is {value:g}, must be a whole number of at least 1")
        return None if value is None else int(value)

    def seconds(self, name: str) -> float | None:
        value = self.number(name)
        if value is not None and value < 0:
            raise self.error(name, f"is {value} s, must be at least 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def indices(self, name: str) -> tuple[int, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        numbers = list(value) if isinstance(value, list | tuple) else [-1]
        whole = all(type(number) is int and 0 <= number < 1 << 53 for number in numbers)
        if not whole or numbers != sorted(numbers):
            raise self.error(name, "must be a list of whole numbers from 0 that never fall")
        return tuple(numbers)

    def pixels(self, default_min: int, cap: int) -> tuple[int, int]:
        low, high = self.count("min_pixels"), self.count("max_pixels")
        low = default_min if low is None else low
        high = cap if high is None else min(high, cap)
        if low > high:
            name = "min_pixels" if "min_pixels" in self.values else "max_pixels"
            raise self.error(
                name, f"leaves min_pixels {low} over max_pixels {high}; give both, in order"
            )
        return low, high
