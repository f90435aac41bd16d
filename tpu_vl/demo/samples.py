"""Synthetic pictures and clips with known answers, each made from a split, a kind and a number."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from PIL import Image

from tpu_vl.demo import canvas as canvases
from tpu_vl.demo import glyphs, words
from tpu_vl.vision.video import group_times

Split = Literal["train", "heldout"]

# A sample's seed is (split, kind, index): the two splits share no seed.
_SPLITS = {"train": 0, "heldout": 1}

# Training draws sides that are multiples of 4, up to the first bound; held-out samples any side,
# up to the second.
IMAGE_SIDES = (32, 320, 640)
CLIP_SIDES = (32, 128, 160)
CLIP_FRAMES = (2, 32)
CLIP_RATES = (1.0, 2.0, 4.0, 5.0, 8.0, 10.0, 12.5, 15.0, 24.0, 25.0, 30.0)
MAX_ASPECT = 4.0
MAX_TURN = math.radians(25)
FRAMES_PER_GROUP = 2


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One shape or digit of a frame.

    Args:
        name: of `words.SHAPES`, or a digit.
        colour: of `words.COLOURS`.
        centre: column and row, in pixels.
        half: half of its width and of its height, in pixels.
        place: of a digit: 0 for units, 1 for tens.
    """

    name: str
    colour: str
    centre: tuple[float, float]
    half: tuple[float, float]
    place: int = 0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question about a sample, as a task with the words that fill it, and its answer."""

    task: str
    answer: str
    slots: dict[str, str] = field(default_factory=dict)

    def text(self, phrasing: int) -> str:
        """The question, in one of the phrasings of its task, counted round."""
        phrasings = words.QUESTIONS[self.task]
        return phrasings[phrasing % len(phrasings)].format(**self.slots)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One or two pictures, or a clip, and what can be asked.

    Args:
        kind: of `KINDS`.
        media: frames of each medium; a still picture is one frame.
        things: what each frame of each medium shows.
        rate: frames per second of a clip; 0 for pictures.
        asks: every question with its right answer.
    """

    kind: str
    media: tuple[tuple[Image.Image, ...], ...]
    things: tuple[tuple[tuple[Thing, ...], ...], ...]
    rate: float
    asks: tuple[Ask, ...]

    @property
    def is_clip(self) -> bool:
        """Whether the medium is a video."""
        return self.rate > 0

    def ask(self, task: str) -> Ask:
        """The first question of a task.

        Raises:
            ValueError: there is none; names the tasks that there are.
        """
        for ask in self.asks:
            if ask.task == task:
                return ask
        known = sorted({ask.task for ask in self.asks})
        raise ValueError(f"a sample of kind {self.kind} has no {task}; it has {', '.join(known)}")


def generator(split: Split, kind: str, index: int) -> np.random.Generator:
    """The random numbers of one sample; no two of (split, kind, index) share a stream."""
    return np.random.default_rng([_SPLITS[split], list(KINDS).index(kind), index])


def sample(split: Split, kind: str, index: int) -> Sample:
    """A sample.

    Args:
        split: "train" or "heldout".
        kind: of `KINDS`.
        index: number of the sample in its split and kind, >= 0.
    """
    return KINDS[kind](generator(split, kind, index), split)


def _side(rng: np.random.Generator, split: Split, bounds: tuple[int, int, int]) -> tuple[int, int]:
    """Width and height between the bounds, in a ratio of at most `MAX_ASPECT`."""
    low, high = bounds[0], bounds[1 + _SPLITS[split]]
    first = math.exp(rng.uniform(math.log(low), math.log(high)))
    second = first * MAX_ASPECT ** rng.triangular(-1, 0, 1)
    step = 4 if split == "train" else 1
    width, height = (step * round(min(max(side, low), high) / step) for side in (first, second))
    return width, height


def _colours(rng: np.random.Generator, count: int) -> list[str]:
    """Different colours."""
    return [str(name) for name in rng.choice(list(words.COLOURS), count, replace=False)]


def _rgb(rng: np.random.Generator, colour: str) -> np.ndarray:
    rgb = np.asarray(words.COLOURS[colour], np.float32) + rng.uniform(-12, 12, 3)
    return rgb.astype(np.float32)


def _angle(rng: np.random.Generator) -> float:
    return float(rng.uniform(-MAX_TURN, MAX_TURN))


def _put(
    rng: np.random.Generator,
    canvas: np.ndarray,
    shape: str,
    colour: str,
    centre: tuple[float, float],
    radius: float,
) -> Thing:
    canvases.draw_shape(canvas, shape, _rgb(rng, colour), centre, radius, _angle(rng))
    return Thing(name=shape, colour=colour, centre=centre, half=(radius, radius))


def _still(kind: str, canvas: np.ndarray, things: list[Thing], asks: list[Ask]) -> Sample:
    return Sample(
        kind=kind,
        media=((canvases.to_image(canvas),),),
        things=((tuple(things),),),
        rate=0.0,
        asks=tuple(asks),
    )


def _one(rng: np.random.Generator, split: Split) -> Sample:
    """A picture of one large shape."""
    width, height = _side(rng, split, IMAGE_SIDES)
    radius = min(width, height) * rng.uniform(0.22, 0.46)
    centre = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
    shape, colour = str(rng.choice(words.SHAPES)), _colours(rng, 1)[0]
    canvas = canvases.background(rng, width, height)
    thing = _put(rng, canvas, shape, colour, centre, radius)
    asks = [
        Ask(task="shape", answer=shape),
        Ask(task="colour", answer=colour),
        Ask(task="describe", answer=words.sentence(words.named(colour, shape))),
        Ask(task="count", answer=words.COUNTS[0]),
    ]
    return _still("one", canvas, [thing], asks)


def _two(rng: np.random.Generator, split: Split) -> Sample:
    """A picture of two shapes of different colours, clearly beside or above each other."""
    size = _side(rng, split, IMAGE_SIDES)
    axis = int(rng.integers(2))
    radii = min(size) * rng.uniform(0.13, 0.22, 2)
    reach = float(radii.sum())
    apart = rng.uniform(1.15 * reach, max(1.2 * reach, size[axis] - reach))
    first = rng.uniform(radii[0], size[axis] - radii[1] - apart)
    across = rng.uniform(radii[0], size[1 - axis] - radii[0])
    low, high = radii[1], size[1 - axis] - radii[1]
    other = float(np.clip(across + apart * rng.uniform(-0.5, 0.5), low, high))
    points = [(first, across), (first + apart, other)]
    centres = [(float(a), float(b)) if axis == 0 else (float(b), float(a)) for a, b in points]
    shapes = [str(s) for s in rng.choice(words.SHAPES, 2, replace=bool(rng.random() < 0.2))]
    colours = _colours(rng, 2)
    canvas = canvases.background(rng, *size)
    things = [
        _put(rng, canvas, *what)
        for what in zip(shapes, colours, centres, map(float, radii), strict=True)
    ]
    return _still("two", canvas, things, _asks_of_two(things, axis))


def _asks_of_two(things: list[Thing], axis: int) -> list[Ask]:
    """The first thing lies left of (axis 0) or above (axis 1) the second one."""
    forward, back = ("left of", "right of") if axis == 0 else ("above", "below")
    names = [f"{thing.colour} {thing.name}" for thing in things]
    full = [words.named(thing.colour, thing.name) for thing in things]
    pair, turned = ({"first": a, "second": b} for a, b in (names, names[::-1]))
    asks = [
        Ask(task="relation", slots=pair, answer=forward),
        Ask(task="relation", slots=turned, answer=back),
        Ask(task="describe", answer=words.sentence(f"{full[0]} {forward} {full[1]}")),
        Ask(task="count", answer=words.COUNTS[1]),
    ]
    return asks + _binding_asks(things)


def _binding_asks(things: list[Thing]) -> list[Ask]:
    """The shape of each colour and the colour of each shape that occurs once."""
    asks = []
    for thing in things:
        if sum(other.colour == thing.colour for other in things) == 1:
            slots = {"colour": thing.colour}
            asks.append(Ask(task="shape_of", slots=slots, answer=thing.name))
        if sum(other.name == thing.name for other in things) == 1:
            slots = {"shape": thing.name}
            asks.append(Ask(task="colour_of", slots=slots, answer=thing.colour))
    return asks


def _crowd(rng: np.random.Generator, split: Split) -> Sample:
    """A picture of one to four shapes anywhere."""
    size = _side(rng, split, IMAGE_SIDES)
    count = int(rng.integers(1, 1 + len(words.COUNTS)))
    spots = _spots(rng, size, count)
    canvas = canvases.background(rng, *size)
    things = [
        _put(rng, canvas, str(rng.choice(words.SHAPES)), _colours(rng, 1)[0], (x, y), radius)
        for x, y, radius in spots
    ]
    asks = [Ask(task="count", answer=words.COUNTS[count - 1])]
    if count > 2:
        text = words.sentence(f"{words.COUNTS[count - 1]} shapes")
        asks.append(Ask(task="describe", answer=text))
    if count > 1:
        asks += _binding_asks(things)
    return _still("crowd", canvas, things, asks)


def _spots(
    rng: np.random.Generator, size: tuple[int, int], count: int
) -> list[tuple[float, float, float]]:
    """Circles (column, row, radius) that do not touch, drawn smaller until they find room."""
    shrink = 1.0
    while True:
        spots: list[tuple[float, float, float]] = []
        for _ in range(count):
            radius = min(size) * rng.uniform(0.13, 0.22) * shrink
            x, y = (rng.uniform(radius, side - radius) for side in size)
            if all(math.hypot(x - a, y - b) > 1.15 * (radius + r) for a, b, r in spots):
                spots.append((float(x), float(y), float(radius)))
        if len(spots) == count:
            return spots
        shrink = max(0.75, 0.99 * shrink)


def _digit(rng: np.random.Generator, split: Split) -> Sample:
    return _written(rng, split, "digit", str(rng.integers(10)))


def _number(rng: np.random.Generator, split: Split) -> Sample:
    return _written(rng, split, "number", str(rng.integers(10, 100)))


def _written(rng: np.random.Generator, split: Split, kind: str, text: str) -> Sample:
    """A picture of digits; every third held-out one is in a font that training never draws."""
    width, height = _side(rng, split, IMAGE_SIDES)
    font = _font(rng, split)
    _, total = glyphs.layout(font, text)
    total += 2 * glyphs.SLACK
    largest = min(0.9 * height, 0.95 * width / total)
    tall = largest * rng.uniform(0.6, 1.0)
    left = rng.uniform(0, width - total * tall) + glyphs.SLACK * tall
    top = rng.uniform(0, height - tall)
    colour = _colours(rng, 1)[0]
    canvas = canvases.background(rng, width, height)
    boxes = canvases.draw_number(
        canvas, text, font, _rgb(rng, colour), float(left), float(top), float(tall)
    )
    things = [
        Thing(
            name=name,
            colour=colour,
            centre=((box[0] + box[2]) / 2, (box[1] + box[3]) / 2),
            half=((box[2] - box[0]) / 2, (box[3] - box[1]) / 2),
            place=len(text) - 1 - i,
        )
        for i, (name, box) in enumerate(zip(text, boxes, strict=True))
    ]
    asks = [
        Ask(task=kind, answer=text),
        Ask(task="colour", answer=colour),
        Ask(task="describe", answer=words.sentence(f"the {kind} {text}")),
    ]
    return _still(kind, canvas, things, asks)


def _font(rng: np.random.Generator, split: Split) -> int:
    if split == "heldout" and rng.random() < 1 / 3:
        return int(rng.integers(glyphs.NUM_TRAINED_FONTS, glyphs.NUM_FONTS))
    if rng.random() < 0.2:
        return glyphs.OUTLINE_FONT
    return int(rng.integers(glyphs.NUM_TRAINED_FONTS))


def _pair(rng: np.random.Generator, split: Split) -> Sample:
    """Two pictures of one size with a shape each; one is clearly larger."""
    size = _side(rng, split, IMAGE_SIDES)
    small = rng.uniform(0.16, 0.3)
    radii = min(size) * np.asarray([small, min(0.47, small * rng.uniform(1.5, 2.2))])
    if rng.random() < 0.5:
        radii = radii[::-1]
    colours = _colours(rng, 2)
    if rng.random() < 0.5:
        colours[1] = colours[0]
    shapes = [str(s) for s in rng.choice(words.SHAPES, 2)]
    media, things = [], []
    for shape, colour, radius in zip(shapes, colours, map(float, radii), strict=True):
        centre = (
            float(rng.uniform(radius, size[0] - radius)),
            float(rng.uniform(radius, size[1] - radius)),
        )
        canvas = canvases.background(rng, *size)
        things.append(((_put(rng, canvas, shape, colour, centre, radius),),))
        media.append((canvases.to_image(canvas),))
    asks = [
        Ask(task="larger", answer=words.PLACES[int(radii[1] > radii[0])]),
        Ask(task="same", answer="yes" if colours[0] == colours[1] else "no"),
    ]
    names = [f"{colour} {shape}" for colour, shape in zip(colours, shapes, strict=True)]
    if names[0] != names[1]:
        # Which one is asked first must not tell the answer.
        for place in rng.permutation(2):
            slots = {"thing": names[place]}
            asks.append(Ask(task="which", slots=slots, answer=words.PLACES[place]))
    return Sample(kind="pair", media=tuple(media), things=tuple(things), rate=0.0, asks=tuple(asks))


def _move(rng: np.random.Generator, split: Split) -> Sample:
    return _clip(rng, split, "move", 1)


def _turn(rng: np.random.Generator, split: Split) -> Sample:
    return _clip(rng, split, "turn", int(rng.integers(2, 4)))


def _clip(rng: np.random.Generator, split: Split, kind: str, num_colours: int) -> Sample:
    """A clip of a shape that moves along one axis and takes one colour after the other.

    It travels at least a third of the side that it moves along. A colour lasts for whole pairs of
    frames, since the model sees a clip in pairs.
    """
    # Even sides, because the usual video formats store colour at half the resolution.
    width, height = (2 * (side // 2) for side in _side(rng, split, CLIP_SIDES))
    low, high = max(CLIP_FRAMES[0], FRAMES_PER_GROUP * (num_colours - 1) + 1), CLIP_FRAMES[1]
    num_frames = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    num_groups = -(-num_frames // FRAMES_PER_GROUP)
    starts = np.sort(rng.choice(np.arange(1, num_groups), num_colours - 1, replace=False))
    colours = _colours(rng, num_colours)
    phase_of = np.searchsorted(starts, np.arange(num_groups), side="right")
    rgbs = [_rgb(rng, colour) for colour in colours]
    radius = min(width, height) * float(rng.uniform(0.18, 0.28))
    direction = str(rng.choice(list(words.DIRECTIONS)))
    shape, angle = str(rng.choice(words.SHAPES)), _angle(rng)
    canvas = canvases.background(rng, width, height)
    frames, things = [], []
    for i, centre in enumerate(_path(rng, direction, (width, height), radius, num_frames)):
        phase = int(phase_of[i // FRAMES_PER_GROUP])
        frame = canvas.copy()
        canvases.draw_shape(frame, shape, rgbs[phase], centre, radius, angle)
        frames.append(canvases.to_image(frame))
        thing = Thing(name=shape, colour=colours[phase], centre=centre, half=(radius, radius))
        things.append((thing,))
    rate = float(rng.choice(CLIP_RATES))
    times_s = clip_times(num_frames, rate)
    asks = [
        Ask(task="direction", answer=direction),
        Ask(task="order", answer=", ".join(colours)),
    ]
    for colour, start in zip(colours[1:], starts, strict=True):
        answer = f"{times_s[start]:.1f} seconds"
        asks.append(Ask(task="when", slots={"colour": colour}, answer=answer))
    return Sample(
        kind=kind, media=(tuple(frames),), things=(tuple(things),), rate=rate, asks=tuple(asks)
    )


def clip_times(num_frames: int, rate: float) -> tuple[float, ...]:
    """The time of every pair of frames in seconds, as the model is told it: the pair's middle."""
    return group_times([index / rate for index in paired(num_frames)], FRAMES_PER_GROUP)


def paired(num_frames: int) -> list[int]:
    """Frames in whole pairs: the last one stands twice where their number is odd."""
    return [*range(num_frames), *[num_frames - 1] * (num_frames % FRAMES_PER_GROUP)]


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


KINDS: dict[str, Callable[[np.random.Generator, Split], Sample]] = {
    "one": _one,
    "two": _two,
    "crowd": _crowd,
    "digit": _digit,
    "number": _number,
    "pair": _pair,
    "move": _move,
    "turn": _turn,
}
