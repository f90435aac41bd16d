"""Samples as the files that clients send: pictures, MP4 clips, data: addresses."""

import base64
import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
from PIL import Image

IMAGE_FORMATS = {"png": {}, "jpeg": {"quality": 92}, "webp": {"quality": 92}}

# With its macroblock tree, or with threads, x264 does not always give the same bytes.
_X264 = {"crf": "14", "x264-params": "mbtree=0"}


def image_bytes(image: Image.Image, name: str) -> bytes:
    """An encoded picture.

    Args:
        image: RGB.
        name: a key of `IMAGE_FORMATS`.
    """
    buffer = io.BytesIO()
    image.save(buffer, name, **IMAGE_FORMATS[name])
    return buffer.getvalue()


def video_bytes(frames: Sequence[Image.Image], fps: float) -> bytes:
    """An MP4 file (H.264) of a clip.

    Args:
        frames: RGB pictures of one size with even sides.
        fps: frames per second.
    """
    buffer = io.BytesIO()
    width, height = frames[0].size
    rate = Fraction(fps).limit_denominator(1000)
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options=_X264)
        stream.codec_context.thread_count = 1
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return buffer.getvalue()


def data_url(media_type: str, data: bytes) -> str:
    """The data: address of a file."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
