"""Digits drawn with strokes: a font is a way to draw each, with a slant, a weight, a width."""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from PIL import ImageDraw, ImageFont

# Strokes of each digit in several ways, in a box of width and height 1, rows downwards. A stroke
# is a list of corners that `_rounded` bends; one that ends where it began is closed.
_O = [(0.5, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0.5, 0)]
_SKELETONS: dict[str, tuple[list[list[tuple[float, float]]], ...]] = {
    "0": (
        [_O],
        [[(0.5, 0), (0.95, 0.1), (0.95, 0.9), (0.5, 1), (0.05, 0.9), (0.05, 0.1), (0.5, 0)]],
    ),
    "1": (
        [[(0.5, 0), (0.5, 1)]],
        [[(0.15, 0.25), (0.55, 0)], [(0.55, 0), (0.55, 1)]],
        [[(0.15, 0.25), (0.5, 0)], [(0.5, 0), (0.5, 1)], [(0.1, 1), (0.9, 1)]],
    ),
    "2": (
        [[(0, 0.25), (0, 0), (1, 0), (1, 0.45), (0.4, 0.7), (0, 1)], [(0, 1), (1, 1)]],
        [[(0, 0), (1, 0), (1, 0.5), (0, 0.5), (0, 1), (1, 1)]],
        [[(0, 0.3), (0.1, 0), (0.9, 0), (1, 0.4), (0, 1)], [(0, 1), (1, 1)]],
    ),
    "3": (
        [
            [(0, 0.1), (0.3, 0), (1, 0), (1, 0.48), (0.4, 0.48)],
            [(0.4, 0.48), (1, 0.48), (1, 1), (0.3, 1), (0, 0.88)],
        ],
        [[(0, 0), (1, 0), (1, 0.5), (0.2, 0.5)], [(0.2, 0.5), (1, 0.5), (1, 1), (0, 1)]],
        [
            [(0, 0), (1, 0)],
            [(1, 0), (0.45, 0.42)],
            [(0.45, 0.42), (1, 0.45), (1, 1), (0, 1), (0, 0.85)],
        ],
    ),
    "4": (
        [[(0.75, 1), (0.75, 0)], [(0.75, 0), (0, 0.68)], [(0, 0.68), (1, 0.68)]],
        [[(0.1, 0), (0, 0.55)], [(0, 0.55), (1, 0.55)], [(0.8, 0), (0.8, 1)]],
        [[(0.55, 0), (0, 0.7)], [(0, 0.7), (1, 0.7)], [(0.7, 0.4), (0.7, 1)]],
    ),
    "5": (
        [
            [(0.95, 0), (0.1, 0)],
            [(0.1, 0), (0.05, 0.45)],
            [(0.05, 0.45), (1, 0.3), (1, 1), (0.2, 1), (0, 0.88)],
        ],
        [[(1, 0), (0, 0), (0, 0.5), (1, 0.5), (1, 1), (0, 1)]],
        [
            [(1, 0), (0.15, 0)],
            [(0.15, 0), (0.1, 0.4)],
            [(0.1, 0.4), (0.9, 0.4), (1, 0.95), (0.4, 1), (0, 0.95)],
        ],
    ),
    "6": (
        [[(0.9, 0.1), (0.2, -0.1), (0, 0.5), (0, 1), (1, 1), (1, 0.42), (0.1, 0.4), (0, 0.65)]],
        [[(1, 0), (0, 0), (0, 1), (1, 1), (1, 0.5), (0, 0.5)]],
        [[(0.75, 0), (0.2, 0.3), (0, 0.7), (0.1, 1), (0.9, 1), (1, 0.5), (0.3, 0.4), (0.02, 0.7)]],
    ),
    "7": (
        [[(0, 0), (1, 0)], [(1, 0), (0.35, 1)]],
        [[(0, 0), (1, 0)], [(1, 0), (0.4, 1)], [(0.25, 0.52), (0.9, 0.52)]],
        [[(0, 0.15), (0, 0)], [(0, 0), (1, 0)], [(1, 0), (0.5, 0.5), (0.4, 1)]],
    ),
    "8": (
        [
            [(0.5, 0), (0.92, 0), (0.92, 0.47), (0.08, 0.47), (0.08, 0), (0.5, 0)],
            [(0.5, 0.47), (1, 0.47), (1, 1), (0, 1), (0, 0.47), (0.5, 0.47)],
        ],
        [
            [(0.5, 0), (1, 0), (1, 0.5), (0, 0.5), (0, 0), (0.5, 0)],
            [(0.5, 0.5), (1, 0.5), (1, 1), (0, 1), (0, 0.5), (0.5, 0.5)],
        ],
        [
            [
                (0.5, 0.48),
                (0, 0.35),
                (0.1, 0),
                (0.9, 0),
                (1, 0.35),
                (0, 0.65),
                (0, 1),
                (1, 1),
                (1, 0.65),
                (0.5, 0.48),
            ]
        ],
    ),
    "9": (
        [[(1, 0.35), (0.9, 0.6), (0, 0.58), (0, 0), (1, 0), (1, 0.5), (0.8, 1.1), (0.1, 0.9)]],
        [[(0, 1), (1, 1), (1, 0), (0, 0), (0, 0.5), (1, 0.5)]],
        [[(1, 0.3), (0.7, 0.6), (0, 0.55), (0.05, 0), (0.95, 0), (1, 0.35)], [(1, 0.3), (0.75, 1)]],
    ),
}
_BOX_SKELETON = 1  # this way of every digit but 1, 4 and 7 is made of straight bars
NUM_TRAINED_FONTS = 48
NUM_FONTS = 64
SLACK = 0.16  # of a height, by which slanted digits leave their boxes
OUTLINE_FONT = NUM_FONTS  # Pillow's own outline font, one more


@dataclass(frozen=True, kw_only=True)
class Font:
    """A way to draw digits.

    Args:
        ways: which skeleton each digit takes.
        bends: how often corners are cut: 0 leaves them sharp.
        slant: shift of the top edge to the right, in heights.
        width: of a digit, in heights.
        weight: of a stroke, in heights.
        gap: between two digits, in heights.
    """

    ways: tuple[int, ...]
    bends: int
    slant: float
    width: float
    weight: float
    gap: float


@cache
def font(number: int) -> Font:
    """The stroke font of a number in [0, NUM_FONTS): the same number, the same font.

    Fonts from `NUM_TRAINED_FONTS` on are held out: no training sample is drawn with them.
    """
    rng = np.random.default_rng([5, number])
    is_box = rng.random() < 0.2
    ways = [int(rng.integers(len(_SKELETONS[digit]))) for digit in sorted(_SKELETONS)]
    if is_box:
        ways = [_BOX_SKELETON if i not in (1, 7) else way for i, way in enumerate(ways)]
    width = float(rng.uniform(0.42, 0.68))
    return Font(
        ways=tuple(ways),
        bends=0 if is_box and rng.random() < 0.5 else int(rng.integers(1, 4)),
        slant=float(rng.uniform(-0.05, 0.28)),
        width=width,
        weight=float(rng.uniform(0.08, 0.32 * width)),
        gap=float(rng.uniform(0.1, 0.22)),
    )


def _rounded(points: list[tuple[float, float]], bends: int) -> np.ndarray:
    """Chaikin's corner cutting; the ends stay."""
    line = np.asarray(points, np.float64)
    for _ in range(bends if len(line) > 2 else 0):
        first, last = line[:-1], line[1:]
        cut = np.stack([0.75 * first + 0.25 * last, 0.25 * first + 0.75 * last], axis=1)
        line = np.concatenate([line[:1], cut.reshape(-1, 2)[1:-1], line[-1:]])
    return line


@lru_cache(maxsize=4096)
def _strokes(number: int, digit: str) -> tuple[np.ndarray, ...]:
    """Lines of a digit in heights, slanted; the box is [0, width] x [0, 1]."""
    style = font(number)
    skeleton = _SKELETONS[digit][style.ways[int(digit)]]
    inner = 1 - style.weight
    lines = []
    for stroke in skeleton:
        line = _rounded(stroke, style.bends)
        y = style.weight / 2 + line[:, 1] * inner
        x = style.weight / 2 + line[:, 0] * (style.width - style.weight)
        lines.append(np.stack([x + style.slant * (0.5 - y), y], axis=1))
    return tuple(lines)


def layout(number: int, text: str) -> tuple[list[tuple[float, float]], float]:
    """Where the digits of a text stand.

    Args:
        number: font, in [0, NUM_FONTS]; the last one is `OUTLINE_FONT`.
        text: digits.

    Returns:
        Left edge and width of each digit's box, and the width of all, in heights.
    """
    if number == OUTLINE_FONT:
        widths, gap = [0.72] * len(text), 0.05
    else:
        widths, gap = [font(number).width] * len(text), font(number).gap
    lefts = [sum(widths[:i]) + gap * i for i in range(len(text))]
    return list(zip(lefts, widths, strict=True)), lefts[-1] + widths[-1]


def draw(
    pen: ImageDraw.ImageDraw, number: int, digit: str, left: float, top: float, height: float
) -> None:
    """Draws one digit, white, with its box's corner at (left, top) pixels.

    Args:
        pen: over a mask ("L").
        number: font.
        digit: one character.
        left, top, height: of the box, in pixels.
    """
    if number == OUTLINE_FONT:
        # The capital height of this font is about 0.72 of its size.
        letters = _outline_font(max(6, round(height / 0.72)))
        box = pen.textbbox((0, 0), digit, font=letters)
        width = 0.72 * height
        x = left + (width - (box[2] - box[0])) / 2 - box[0]
        pen.text((x, top - box[1]), digit, fill=255, font=letters)
        return
    pen_width = font(number).weight * height
    radius = pen_width / 2
    for line in _strokes(number, digit):
        points = (line * height + (left, top)).tolist()
        pen.line([tuple(p) for p in points], fill=255, width=max(1, round(pen_width)))
        for x, y in points:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)


@lru_cache(maxsize=64)
def _outline_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
