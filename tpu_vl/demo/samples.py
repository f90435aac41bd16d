"""Synthetic pictures and videos with known answers, each made from a split and a number."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from tpu_vl.demo import words

Split = Literal["train", "heldout"]

# A sample's seed is (split, kind, index): the two splits share no seed.
_SPLITS = {"train": 0, "heldout": 1}
_IMAGE, _VIDEO = 0, 1

IMAGE_SIDES = (32, 512)
VIDEO_SIDES = (32, 128)
VIDEO_FRAMES = (2, 16)
VIDEO_RATES = (2.0, 4.0, 5.0, 8.0, 10.0, 12.5, 15.0, 24.0, 25.0, 30.0)
MAX_ASPECT = 2.0
MAX_TURN = math.radians(25)
_MASK_SCALE = 4


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One picture or clip and what is true of it.

    Args:
        frames: RGB pictures of one size; a single one for a still picture.
        rate: frames per second of a clip; 0 for a still picture.
        shape, colour: what is drawn, from `words`.
        direction: of the movement; None for a still picture.
        centres: of the shape in each frame, as (column, row) in pixels.
        radius: of the circle around the shape, in pixels.
    """

    frames: tuple[Image.Image, ...]
    rate: float
    shape: str
    colour: str
    direction: str | None
    centres: tuple[tuple[float, float], ...]
    radius: float

    def answer(self, task: str) -> str:
        """The right answer to a task of `words.QUESTIONS`."""
        return words.answer(task, shape=self.shape, colour=self.colour, direction=self.direction)


def generator(split: Split, kind: int, index: int) -> np.random.Generator:
    """The random numbers of one sample; no two of (split, kind, index) share a stream."""
    return np.random.default_rng([_SPLITS[split], kind, index])


def image(split: Split, index: int) -> Sample:
    """A still picture of 32 to 512 pixels a side.

    Args:
        split: "train" or "heldout".
        index: number of the sample in its split, >= 0.
    """
    rng = generator(split, _IMAGE, index)
    width, height = _size(rng, IMAGE_SIDES)
    radius = min(width, height) * rng.uniform(0.3, 0.46)
    centre = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
    shape, colour, rgb = _subject(rng)
    canvas = _background(rng, width, height)
    _draw(canvas, shape, rgb, centre, radius, rng.uniform(-MAX_TURN, MAX_TURN))
    return Sample(
        frames=(Image.fromarray(_to_uint8(canvas)),),
        rate=0.0,
        shape=shape,
        colour=colour,
        direction=None,
        centres=(centre,),
        radius=radius,
    )


def video(split: Split, index: int) -> Sample:
    """A clip of 2 to 16 frames of 32 to 128 pixels a side with a shape moving along one axis.

    The shape travels at least a third of the side that it moves along.

    Args:
        split: "train" or "heldout".
        index: number of the sample in its split, >= 0.
    """
    rng = generator(split, _VIDEO, index)
    # Even sides, because the usual video formats store colour at half the resolution.
    width, height = (2 * (side // 2) for side in _size(rng, VIDEO_SIDES))
    num_frames = int(rng.integers(VIDEO_FRAMES[0], VIDEO_FRAMES[1] + 1))
    radius = min(width, height) * rng.uniform(0.18, 0.28)
    direction = str(rng.choice(list(words.DIRECTIONS)))
    shape, colour, rgb = _subject(rng)
    canvas = _background(rng, width, height)
    angle = rng.uniform(-MAX_TURN, MAX_TURN)
    centres = _path(rng, direction, (width, height), radius, num_frames)
    frames = []
    for centre in centres:
        frame = canvas.copy()
        _draw(frame, shape, rgb, centre, radius, angle)
        frames.append(Image.fromarray(_to_uint8(frame)))
    return Sample(
        frames=tuple(frames),
        rate=float(rng.choice(VIDEO_RATES)),
        shape=shape,
        colour=colour,
        direction=direction,
        centres=centres,
        radius=radius,
    )


def _size(rng: np.random.Generator, bounds: tuple[int, int]) -> tuple[int, int]:
    """Width and height between the bounds, in a ratio of at most `MAX_ASPECT`."""
    low, high = bounds
    first = math.exp(rng.uniform(math.log(low), math.log(high)))
    second = first * MAX_ASPECT ** rng.uniform(-1, 1)
    width, height = (round(min(max(side, low), high)) for side in (first, second))
    return width, height


def _subject(rng: np.random.Generator) -> tuple[str, str, np.ndarray]:
    shape = str(rng.choice(words.SHAPES))
    colour = str(rng.choice(list(words.COLOURS)))
    rgb = np.asarray(words.COLOURS[colour], np.float32) + rng.uniform(-12, 12, 3)
    return shape, colour, rgb.astype(np.float32)


def _background(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A light, greyish canvas: plain, a gentle gradient, noise, or a gradient with noise."""
    grey = rng.uniform(165, 235)
    base = grey + rng.uniform(-14, 14, 3)
    canvas = np.broadcast_to(base.astype(np.float32), (height, width, 3)).copy()
    style = rng.integers(4)
    if style in (1, 3):
        angle, depth = rng.uniform(0, 2 * math.pi), rng.uniform(8, 25)
        rows = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
        columns = np.linspace(-1, 1, width, dtype=np.float32)[None]
        canvas += (depth * (math.cos(angle) * columns + math.sin(angle) * rows))[..., None]
    if style in (2, 3):
        noise = rng.standard_normal((height, width, 1), np.float32)
        canvas += noise * np.float32(rng.uniform(2, 8))
    return canvas


def _path(
    rng: np.random.Generator,
    direction: str,
    size: tuple[int, int],
    radius: float,
    num_frames: int,
) -> tuple[tuple[float, float], ...]:
    """Centres of a steady straight movement that keeps the shape inside the frame."""
    step = words.DIRECTIONS[direction]
    axis = 0 if step[0] else 1
    room = size[axis] - 2 * radius
    travel = rng.uniform(size[axis] / 3, room)
    first = radius + rng.uniform(0, room - travel)
    along = first + travel * np.linspace(0, 1, num_frames)
    if step[axis] < 0:
        along = along[::-1]
    across = rng.uniform(radius, size[1 - axis] - radius)
    points = [(float(a), float(across)) for a in along]
    return tuple(points if axis == 0 else [(b, a) for a, b in points])


def _outline(shape: str, angle: float) -> np.ndarray:
    """Corners of an upright shape in the unit circle, turned by an angle; not for circles."""

    def at(turns: np.ndarray, radii: np.ndarray | float = 1.0) -> np.ndarray:
        phase = turns * 2 * math.pi + angle - math.pi / 2
        return np.stack([np.cos(phase) * radii, np.sin(phase) * radii], axis=-1)

    if shape == "square":
        return at(np.arange(4) / 4 + 1 / 8)
    if shape == "triangle":
        return at(np.arange(3) / 3)
    if shape == "star":
        return at(np.arange(10) / 10, np.where(np.arange(10) % 2, 0.42, 1.0))
    # A cross: two bars of a third of its length. Corners at (1, w), (w, w), (w, 1) and so on.
    half = 0.33
    quarter = np.array([(1, -half), (1, half), (half, half)]) / math.hypot(1, half)
    corners = []
    for turn in range(4):
        phase = turn * math.pi / 2 + angle
        rotation = np.array(
            [(math.cos(phase), -math.sin(phase)), (math.sin(phase), math.cos(phase))]
        )
        corners.append(quarter @ rotation.T)
    return np.concatenate(corners)


def _draw(
    canvas: np.ndarray,
    shape: str,
    rgb: np.ndarray,
    centre: tuple[float, float],
    radius: float,
    angle: float,
) -> None:
    """Blends an anti-aliased shape into a float canvas, in place."""
    height, width = canvas.shape[:2]
    left, top = (
        max(0, math.floor(centre[0] - radius) - 1),
        max(0, math.floor(centre[1] - radius) - 1),
    )
    right = min(width, math.ceil(centre[0] + radius) + 1)
    bottom = min(height, math.ceil(centre[1] + radius) + 1)
    scale = _MASK_SCALE
    mask = Image.new("L", ((right - left) * scale, (bottom - top) * scale))
    pen = ImageDraw.Draw(mask)
    middle = (np.asarray(centre) - (left, top)) * scale
    if shape == "circle":
        pen.ellipse([*(middle - radius * scale), *(middle + radius * scale)], fill=255)
    else:
        corners = middle + _outline(shape, angle) * radius * scale
        pen.polygon([tuple(corner) for corner in corners.tolist()], fill=255)
    cover = np.asarray(mask.reduce(scale), np.float32)[..., None] / 255
    area = canvas[top:bottom, left:right]
    area += cover * (rgb - area)


def _to_uint8(canvas: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
