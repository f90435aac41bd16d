"""Named workloads: what each request holds and how many are sent how fast."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass, fields

import av
import numpy as np
from PIL import Image

_WORDS = [
    "stone",
    "river",
    "copper",
    "window",
    "seven",
    "garden",
    "paper",
    "silver",
    "morning",
    "engine",
    "yellow",
    "mountain",
    "letter",
    "harbour",
    "winter",
    "glass",
    "planet",
    "forest",
    "number",
    "island",
    "summer",
    "market",
    "bridge",
    "candle",
]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A set of requests.

    Args:
        num_prompts: requests measured.
        concurrency: requests open at once; 0: no bound.
        request_rate: requests per second, exponentially spaced; 0: as fast as possible.
        warmups: requests sent, and waited for, before the measurement.
        input_words: words of text in each request.
        output_tokens: length of each answer (`ignore_eos`).
        num_images, num_videos: media of each request.
        width, height: of an image or a frame, in pixels.
        num_frames: of a video.
        distinct: every medium differs, so that no cache answers.
    """

    num_prompts: int
    concurrency: int = 0
    request_rate: float = 0.0
    warmups: int = 2
    input_words: int = 100
    output_tokens: int = 128
    num_images: int = 0
    num_videos: int = 0
    width: int = 256
    height: int = 256
    num_frames: int = 16
    distinct: bool = True


WORKLOADS = {
    "random-text": Workload(num_prompts=200, concurrency=64, input_words=500, output_tokens=256),
    "random-mm-image": Workload(
        num_prompts=200,
        concurrency=64,
        num_images=1,
        width=512,
        height=512,
        input_words=100,
        output_tokens=128,
    ),
    "random-mm-video": Workload(
        num_prompts=640,
        concurrency=128,
        warmups=8,
        num_videos=1,
        width=256,
        height=256,
        num_frames=16,
        input_words=500,
        output_tokens=1024,
    ),
}

SIZES = tuple(field.name for field in fields(Workload))


def bodies(workload: Workload, model: str, seed: int) -> Iterator[dict]:
    """Chat completion bodies, the warm-ups first; the same for the same seed.

    Args:
        workload: sizes.
        model: id sent with each request.
        seed: of texts and pixels.
    """
    random = np.random.default_rng(seed)
    media: list[dict] = []
    for _ in range(workload.warmups + workload.num_prompts):
        if workload.distinct or not media:
            media = [*_images(workload, random), *_videos(workload, random)]
        words = random.choice(_WORDS, workload.input_words)
        content = [*media, {"type": "text", "text": " ".join(words)}]
        yield {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": workload.output_tokens,
            "ignore_eos": True,
            # Behind its end token a model may write special tokens only: they count, so they show.
            "skip_special_tokens": False,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _images(workload: Workload, random: np.random.Generator) -> Iterator[dict]:
    for _ in range(workload.num_images):
        pixels = random.integers(0, 256, (workload.height, workload.width, 3), np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG", compress_level=1)
        yield {"type": "image_url", "image_url": {"url": _url(out.getvalue(), "image/png")}}


def _videos(workload: Workload, random: np.random.Generator) -> Iterator[dict]:
    for _ in range(workload.num_videos):
        url = _url(_mp4(workload, random), "video/mp4")
        yield {
            "type": "video_url",
            "video_url": {"url": url},
            # The frames of the file are the frames of the request, whatever the server's rate.
            "num_frames": workload.num_frames,
        }


def _mp4(workload: Workload, random: np.random.Generator) -> bytes:
    """A film of moving noise, coarse enough to encode fast."""
    out = io.BytesIO()
    cells = (-(-workload.height // 8), -(-workload.width // 8))
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = workload.width, workload.height
        stream.pix_fmt = "yuv420p"
        for _ in range(workload.num_frames):
            coarse = random.integers(0, 256, (*cells, 3), np.uint8)
            pixels = coarse.repeat(8, 0).repeat(8, 1)[: workload.height, : workload.width]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def _url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
