"""Backgrounds and anti-aliased shapes and digits on a float canvas."""

import math

import numpy as np
from PIL import Image, ImageDraw

from tpu_vl.demo import glyphs

# Masks are drawn larger and reduced: small things need it most.
_MASK_SCALES = ((96, 4), (240, 2))


def background(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A light, greyish canvas: plain, a gentle gradient, noise, or a gradient with noise.

    Returns:
        float32 [height, width, 3] in [0, 255].
    """
    grey = rng.uniform(165, 235)
    base = grey + rng.uniform(-14, 14, 3)
    canvas = np.empty((height, width, 3), np.float32)
    canvas[:] = base.astype(np.float32)
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


def outline(shape: str, angle: float) -> np.ndarray:
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


class _Mask:
    """A piece of the canvas, in more detail, that a pen whitens and `blend` paints through."""

    def __init__(self, canvas: np.ndarray, box: tuple[float, float, float, float]) -> None:
        height, width = canvas.shape[:2]
        self.left, self.top = max(0, math.floor(box[0]) - 1), max(0, math.floor(box[1]) - 1)
        right, bottom = min(width, math.ceil(box[2]) + 1), min(height, math.ceil(box[3]) + 1)
        size = max(right - self.left, bottom - self.top)
        self.scale = next((scale for side, scale in _MASK_SCALES if size <= side), 1)
        self.area = canvas[self.top : bottom, self.left : right]
        shape = ((right - self.left) * self.scale, (bottom - self.top) * self.scale)
        self.image = Image.new("L", shape)
        self.pen = ImageDraw.Draw(self.image)

    def place(self, x: float, y: float) -> np.ndarray:
        return np.asarray((x - self.left, y - self.top)) * self.scale

    def blend(self, rgb: np.ndarray) -> None:
        mask = self.image if self.scale == 1 else self.image.reduce(self.scale)
        cover = np.asarray(mask, np.float32)[..., None] * np.float32(1 / 255)
        self.area += cover * (rgb - self.area)


def draw_shape(
    canvas: np.ndarray,
    shape: str,
    rgb: np.ndarray,
    centre: tuple[float, float],
    radius: float,
    angle: float,
) -> None:
    """Blends a shape into a canvas, in place.

    Args:
        canvas: float32 [height, width, 3].
        shape: of `words.SHAPES`.
        rgb: float32 [3].
        centre, radius: of the circle around it, in pixels.
        angle: in radians.
    """
    x, y = centre
    mask = _Mask(canvas, (x - radius, y - radius, x + radius, y + radius))
    middle, size = mask.place(x, y), radius * mask.scale
    if shape == "circle":
        mask.pen.ellipse([*(middle - size), *(middle + size)], fill=255)
    else:
        corners = middle + outline(shape, angle) * size
        mask.pen.polygon([tuple(corner) for corner in corners.tolist()], fill=255)
    mask.blend(rgb)


def draw_number(
    canvas: np.ndarray,
    text: str,
    font: int,
    rgb: np.ndarray,
    left: float,
    top: float,
    height: float,
) -> list[tuple[float, float, float, float]]:
    """Blends digits into a canvas, in place.

    Args:
        canvas: float32 [height, width, 3].
        text: digits.
        font: number of a font of `glyphs`.
        rgb: float32 [3].
        left, top, height: of the text's box, in pixels.

    Returns:
        The box of each digit: left, top, right, bottom, in pixels.
    """
    places, total = glyphs.layout(font, text)
    slack = glyphs.SLACK * height
    mask = _Mask(canvas, (left - slack, top, left + total * height + slack, top + height))
    boxes = []
    for digit, (offset, width) in zip(text, places, strict=True):
        x = left + offset * height
        corner = mask.place(x, top)
        glyphs.draw(mask.pen, font, digit, corner[0], corner[1], height * mask.scale)
        boxes.append((x, top, x + width * height, top + height))
    mask.blend(rgb)
    return boxes


def to_image(canvas: np.ndarray) -> Image.Image:
    """The canvas as an RGB picture of 8 bits."""
    return Image.fromarray(np.clip(np.rint(canvas), 0, 255).astype(np.uint8))
