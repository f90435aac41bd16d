"""Seeded requests: pictures and videos of odd sizes, mixes of parts, odd sampling options."""

import base64
import io
from typing import Any

import av
import numpy as np
from PIL import Image


def picture(rng: np.random.Generator, height: int, width: int) -> bytes:
    """A PNG of smooth random colour."""
    small = rng.integers(0, 256, (3, 3, 3), np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, format=("PNG", "JPEG", "WebP")[int(rng.integers(3))])
    return out.getvalue()


def clip(rng: np.random.Generator, num_frames: int, height: int, width: int, fps: int) -> bytes:
    """An MP4 whose colour drifts."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        base = rng.integers(0, 200, 3)
        for i in range(num_frames):
            pixels = np.full((height, width, 3), base + i % 50, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A data: URL of a file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    """A content part with a picture."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def video_part(data: bytes) -> dict[str, Any]:
    """A content part with a video."""
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def text_part(text: str) -> dict[str, Any]:
    """A content part with text."""
    return {"type": "text", "text": text}


class Pool:
    """Draws requests from one seed.

    Args:
        seed: of everything that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def image(self) -> dict[str, Any]:
        """A picture of a random size and shape."""
        height, width = (int(2 ** self.rng.uniform(0, 9)) for _ in range(2))
        ratio = max(height, width) / min(height, width)
        if ratio > 200:
            height = width
        return image_part(picture(self.rng, height, width))

    def video(self) -> dict[str, Any]:
        """A short clip of a random size, length and rate."""
        height, width = (2 * int(self.rng.integers(8, 60)) for _ in range(2))
        frames, fps = int(self.rng.integers(1, 24)), int(self.rng.choice([1, 2, 5, 8, 25, 30]))
        return video_part(clip(self.rng, frames, height, width, fps))

    def text(self) -> dict[str, Any]:
        """A line of words, sometimes with the template's own markers typed by the user."""
        words = ["what", "shape", "colour", "is", "it", "<|image_pad|>", "é", "日本", "\n", "🙂"]
        return text_part(" ".join(self.rng.choice(words, int(self.rng.integers(1, 30)))))

    def content(self) -> list[dict[str, Any]]:
        """Text alone, 1 to 8 pictures, videos, or a mix, in a random order."""
        kind = self.rng.integers(4)
        parts = [self.text()]
        if kind == 1:
            parts += [self.image() for _ in range(int(self.rng.integers(1, 9)))]
        elif kind == 2:
            parts += [self.video() for _ in range(int(self.rng.integers(1, 3)))]
        elif kind == 3:
            parts += [self.image(), self.video(), self.text(), self.image()]
        self.rng.shuffle(parts)  # pyright: ignore[reportArgumentType]
        return parts

    def options(self) -> dict[str, Any]:
        """Sampling options, often odd ones."""
        rng = self.rng
        choices: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0, "logprobs": True, "top_logprobs": int(rng.integers(0, 21))},
            {"temperature": 1.5, "top_k": 3, "seed": int(rng.integers(1 << 31))},
            {"temperature": 0.7, "top_p": 0.3, "min_p": 0.05},
            {"repetition_penalty": 1.3, "presence_penalty": -1.5, "frequency_penalty": 2},
            {"logit_bias": {str(int(rng.integers(500))): 100}, "stop": ["e", "zz"]},
            {"min_tokens": 3, "ignore_eos": True, "n": 2},
            {"temperature": 2, "top_p": 1e-6, "logprobs": True},
        ]
        return {"max_tokens": int(rng.integers(3, 12)), **choices[int(rng.integers(len(choices)))]}

    def request(self) -> dict[str, Any]:
        """One chat completion body."""
        return {"messages": [{"role": "user", "content": self.content()}], **self.options()}
