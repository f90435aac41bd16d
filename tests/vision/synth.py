"""Media made in memory for the tests: pictures, videos and damaged copies of them."""

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from tpu_vl.config import MediaLimits, ProcessorConfig

DATA = Path(__file__).resolve().parents[1] / "data"
PARAM = "messages.[0].content.[1]"
CFG = ProcessorConfig()
# The settings published with Qwen2.5-VL: patches of 14, cells of 28 pixels.
CFG_25 = ProcessorConfig(patch_size=14, image_min_pixels=3_136, image_max_pixels=12_845_056)
LIMITS = MediaLimits()
FREE = MediaLimits(max_frame_patches=1 << 40, max_request_patches=1 << 40)


def data(name: str) -> bytes:
    """A file of tests/data."""
    return (DATA / name).read_bytes()


def encode(array: np.ndarray | Image.Image, fmt: str = "PNG", **options: object) -> bytes:
    """An encoded picture."""
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def solid_frames(levels: Sequence[int], height: int = 64, width: int = 64) -> list[np.ndarray]:
    """Grey frames, one per level."""
    return [np.full((height, width, 3), level, np.uint8) for level in levels]


def make_video(
    frames: Sequence[np.ndarray],
    fmt: str = "mp4",
    codec: str = "libx264",
    *,
    rate: int | Fraction = 30,
    pixels: str = "yuv420p",
    times_s: Sequence[float] | None = None,
    **options: str,
) -> bytes:
    """A video file; `times_s` gives every frame its own time."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=fmt) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        if times_s is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.time_base = Fraction(1, 1000) if times_s else 1 / Fraction(rate)
            picture.pts = round(times_s[number] * 1000) if times_s else number
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def make_audio(fmt: str = "mp4") -> bytes:
    """A file with an audio stream alone."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=fmt) as container:
        stream = container.add_stream("aac", rate=44_100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 44_100
        container.mux(stream.encode(frame))  # pyright: ignore
        container.mux(stream.encode(None))  # pyright: ignore
    return buffer.getvalue()


def with_matrix(mp4: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """The MP4 with another display matrix in its track header."""
    at = mp4.index(b"tkhd") + 44
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return mp4[:at] + matrix + mp4[at + 36 :]
