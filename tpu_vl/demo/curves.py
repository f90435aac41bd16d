"""Draws a run's log as a picture: `python -m tpu_vl.demo.curves DIR/log.jsonl OUT.png`."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tpu_vl.demo import samples, talks

_SIZE = (1200, 1000)
_LEFT, _RIGHT, _TOP, _GAP = 70, 190, 50, 60
_INK, _GRID = (40, 40, 40), (225, 225, 225)
_COLOURS = (
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (23, 190, 207),
)
# Log lines are averaged so that a curve has about this many points.
_POINTS = 160


def draw(log: Path) -> Image.Image:
    """Three panels over the steps: loss, answer tokens by kind of sample, cells by label.

    Args:
        log: what `tpu_vl.demo.train` writes.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = _averaged([line["step"] for line in lines])
    image = Image.new("RGB", _SIZE, "white")
    pen = ImageDraw.Draw(image)
    panels = (
        ("loss (logarithmic)", {"loss": "loss"}),
        ("right answer tokens by kind of sample", {kind: kind for kind in samples.KINDS}),
        ("right labels of cells", {name: f"cell_{name}" for name in talks.CELL_LABELS}),
    )
    height = (_SIZE[1] - _TOP - _GAP * len(panels)) // len(panels)
    for i, (title, names) in enumerate(panels):
        top = _TOP + i * (height + _GAP)
        curves = {label: _averaged([line[key] for line in lines]) for label, key in names.items()}
        _panel(pen, top, height, title, steps, curves, is_log=i == 0)
    return image


def _averaged(values: Sequence[float]) -> list[float]:
    size = max(1, len(values) // _POINTS)
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    return [sum(group) / len(group) for group in groups]


def _panel(
    pen: ImageDraw.ImageDraw,
    top: int,
    height: int,
    title: str,
    steps: Sequence[float],
    curves: dict[str, list[float]],
    *,
    is_log: bool,
) -> None:
    letters = ImageFont.load_default(15)
    width = _SIZE[0] - _LEFT - _RIGHT
    every = [value for curve in curves.values() for value in curve]
    low = math.log10(min(every)) if is_log else 0.0
    high = math.log10(max(every)) if is_log else 1.0
    high = max(high, low + 1e-6)

    def at(step: float, value: float) -> tuple[float, float]:
        share = ((math.log10(value) if is_log else value) - low) / (high - low)
        return _LEFT + width * step / steps[-1], top + height * (1 - share)

    pen.text((_LEFT, top - 24), title, fill=_INK, font=letters)
    for i in range(6):
        value = low + (high - low) * i / 5
        y = top + height * (1 - i / 5)
        pen.line([(_LEFT, y), (_LEFT + width, y)], fill=_GRID)
        label = f"{10**value:.2f}" if is_log else f"{100 * value:.0f} %"
        pen.text((_LEFT - 8, y), label, fill=_INK, font=letters, anchor="rm")
        x = _LEFT + width * i / 5
        text = f"{steps[-1] * i / 5:.0f}"
        pen.text((x, top + height + 4), text, fill=_INK, font=letters, anchor="mt")
    for i, (label, curve) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        points = [at(step, value) for step, value in zip(steps, curve, strict=True)]
        pen.line(points, fill=colour, width=2)
        y = top + 12 + 22 * i
        pen.line([(_SIZE[0] - _RIGHT + 15, y), (_SIZE[0] - _RIGHT + 45, y)], fill=colour, width=4)
        end = f"{label} {curve[-1]:.3f}"
        pen.text((_SIZE[0] - _RIGHT + 52, y), end, fill=_INK, font=letters, anchor="lm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="log.jsonl of a run")
    parser.add_argument("out", type=Path, help="the PNG file to write")
    args = parser.parse_args()
    draw(args.log).save(args.out)


if __name__ == "__main__":
    main()
