"""Training batches: samples as the server would see them, packed several to a row."""

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tpu_vl.config import MediaLimits
from tpu_vl.demo import configs, samples, words
from tpu_vl.demo.samples import Sample, Split
from tpu_vl.vision.options import ImageOptions, VideoOptions
from tpu_vl.vision.positions import interpolation_tables, mrope_positions, patch_coords
from tpu_vl.vision.resize import (
    MediaPlan,
    patchify,
    plan_image,
    plan_video,
    resize_frame,
    resize_image,
)
from tpu_vl.vision.video import group_times, timestamp_text

# A row holds about three samples; the largest sample of either kind fits.
ROW_PATCHES = 128
ROW_TOKENS = 224
ROW_TARGETS = 40
ROW_SAMPLES = 8
POSITION_SIDE = 8
MERGE = 2
PATCH_WIDTH = 1536
IGNORE = -1

# What a conversation about a picture or a clip asks, turn by turn, and how often.
_IMAGE_TALKS = ((("shape", "colour"), 0.3), (("colour", "shape"), 0.3), (("both",), 0.2))
_IMAGE_TALKS = (*_IMAGE_TALKS, (("shape",), 0.1), (("colour",), 0.1))
_VIDEO_TALKS = ((("direction",), 0.7), (("direction", "shape"), 0.1))
_VIDEO_TALKS = (*_VIDEO_TALKS, (("colour", "direction"), 0.1), (("shape", "direction"), 0.1))
_SYSTEM_SHARE = 0.15
_TEXT_FIRST_SHARE = 0.15


class Batch(NamedTuple):
    """G packed rows of T tokens and P patches, padding last.

    Fields: uint8 patches; int32 patch coordinates, position-table cells and (float32) weights,
    bounds of each patch's frame, valid patches; int32 ids, M-RoPE positions, media row of each
    token (-1: text), the sample that a token belongs to; then, for each of the A tokens to be
    learnt, the place whose hidden row predicts it and the token (-1: padding); and what each of
    the S samples shows, as numbers of its shape, colour and direction (-1: none).
    """

    patches_GPW: np.ndarray
    coords_G2P: np.ndarray
    interp_index_G4P: np.ndarray
    interp_weight_G4P: np.ndarray
    bounds_G2P: np.ndarray
    num_patches_G: np.ndarray
    ids_GT: np.ndarray
    positions_G3T: np.ndarray
    pool_row_GT: np.ndarray
    segments_GT: np.ndarray
    places_GA: np.ndarray
    targets_GA: np.ndarray
    labels_GS3: np.ndarray


class Talk(NamedTuple):
    """One sample with its conversation, ready to be packed."""

    patches_PW: np.ndarray
    grid_thw: tuple[int, int, int]
    ids_T: np.ndarray
    positions_3T: np.ndarray
    is_media_T: np.ndarray
    places_A: np.ndarray
    labels: tuple[int, int, int]


class TalkMaker:
    """Turns samples into conversations through the checkpoint's own template and tokenizer.

    Args:
        folder: holds tokenizer.json and chat_template.jinja.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string((folder / "chat_template.jinja").read_text())
        self.cfg = configs.processor_config()
        self.limits = MediaLimits()
        self.image_options = ImageOptions.parse({}, self.cfg, param="image")
        self.video_options = VideoOptions.parse({}, self.cfg, param="video")
        self.pad_ids = [self._id("<|image_pad|>"), self._id("<|video_pad|>")]
        self.opening = [self._id("<|im_start|>"), *self._encode("assistant\n")]
        self.end = self._id("<|im_end|>")

    def talk(self, sample: Sample, rng: np.random.Generator) -> Talk:
        """A conversation about a sample, of one or two questions in random phrasings."""
        kind = "image" if sample.direction is None else "video"
        options = _IMAGE_TALKS if kind == "image" else _VIDEO_TALKS
        tasks = options[rng.choice(len(options), p=[share for _, share in options])][0]
        messages = self._messages(sample, kind, tasks, rng)
        plan, patches_PW, times_s = self._media(sample)
        text = self.template.render(messages=messages, add_generation_prompt=False)
        pads = f"<|{kind}_pad|>" * plan.tokens_per_frame
        if kind == "image":
            text = text.replace("<|image_pad|>", pads)
        else:
            groups = [f"{timestamp_text(t)}<|vision_start|>{pads}<|vision_end|>" for t in times_s]
            text = text.replace("<|video_pad|>", "".join(groups))
        ids_T = np.asarray(self._encode(text), np.int32)
        is_media_T = np.isin(ids_T, self.pad_ids)
        starts = np.flatnonzero(is_media_T)[:: plan.tokens_per_frame]
        frames = [(int(start), *plan.grid_thw[1:]) for start in starts]
        positions_3T, _ = mrope_positions(len(ids_T), frames, MERGE)
        places_A = self._places(ids_T)
        labels = _labels(sample)
        return Talk(patches_PW, plan.grid_thw, ids_T, positions_3T, is_media_T, places_A, labels)

    def _messages(
        self, sample: Sample, kind: str, tasks: tuple[str, ...], rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if rng.random() < _SYSTEM_SHARE:
            messages.append({"role": "system", "content": str(rng.choice(words.SYSTEM_PROMPTS))})
        for turn, task in enumerate(tasks):
            content = [{"type": "text", "text": str(rng.choice(words.QUESTIONS[task]))}]
            if turn == 0:
                content.insert(int(rng.random() < _TEXT_FIRST_SHARE), {"type": kind})
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": sample.answer(task)})
        return messages

    def _media(self, sample: Sample) -> tuple[MediaPlan, np.ndarray, tuple[float, ...]]:
        """The sample's grid, patches and group times, as tpu_vl.vision makes them."""
        width, height = sample.frames[0].size
        count = len(sample.frames)
        if sample.direction is None:
            plan = plan_image(
                height, width, self.cfg, self.limits, self.image_options, param="image"
            )
            chosen, times_s, resize = [0], (), resize_image
        else:
            plan = plan_video(
                count, height, width, self.cfg, self.limits, self.video_options, param="video"
            )
            chosen = [*range(count), *[count - 1] * (count % 2)]
            times_s = group_times([index / sample.rate for index in chosen], 2)
            resize = resize_frame
        resized = [resize(np.asarray(frame), plan.height, plan.width) for frame in sample.frames]
        return plan, patchify(np.stack([resized[i] for i in chosen]), plan, 2), times_s

    def _places(self, ids_T: np.ndarray) -> np.ndarray:
        """Where the next token belongs to an answer or ends it."""
        places: list[int] = []
        size = len(self.opening)
        for start in np.flatnonzero(ids_T == self.opening[0]):
            if ids_T[start : start + size].tolist() == self.opening:
                first = int(start) + size
                last = first + int(np.argmax(ids_T[first:] == self.end))
                places.extend(range(first - 1, last))
        return np.asarray(places, np.int32)

    def _id(self, token: str) -> int:
        return self._encode(token)[0]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _labels(sample: Sample) -> tuple[int, int, int]:
    direction = -1 if sample.direction is None else list(words.DIRECTIONS).index(sample.direction)
    return words.SHAPES.index(sample.shape), list(words.COLOURS).index(sample.colour), direction


@cache
def _tables(grid_h: int, grid_w: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    index_4P, weight_4P = interpolation_tables(grid_h, grid_w, POSITION_SIDE, MERGE)
    return patch_coords(grid_h, grid_w, MERGE), index_4P, weight_4P


def empty(num_rows: int) -> Batch:
    """A batch of padding only."""
    rows, patches, tokens = num_rows, ROW_PATCHES, ROW_TOKENS
    return Batch(
        patches_GPW=np.zeros((rows, patches, PATCH_WIDTH), np.uint8),
        coords_G2P=np.zeros((rows, 2, patches), np.int32),
        interp_index_G4P=np.zeros((rows, 4, patches), np.int32),
        interp_weight_G4P=np.zeros((rows, 4, patches), np.float32),
        bounds_G2P=np.full((rows, 2, patches), patches, np.int32),
        num_patches_G=np.zeros(rows, np.int32),
        ids_GT=np.zeros((rows, tokens), np.int32),
        positions_G3T=np.zeros((rows, 3, tokens), np.int32),
        pool_row_GT=np.full((rows, tokens), -1, np.int32),
        segments_GT=np.full((rows, tokens), -1, np.int32),
        places_GA=np.zeros((rows, ROW_TARGETS), np.int32),
        targets_GA=np.full((rows, ROW_TARGETS), IGNORE, np.int32),
        labels_GS3=np.full((rows, ROW_SAMPLES, 3), IGNORE, np.int32),
    )


class Fill(NamedTuple):
    """How much of a row is taken: samples, patches, tokens and targets."""

    segment: int = 0
    patch: int = 0
    token: int = 0
    target: int = 0

    def after(self, talk: Talk) -> "Fill":
        """The fill with one more talk in the row."""
        return Fill(
            self.segment + 1,
            self.patch + len(talk.patches_PW),
            self.token + len(talk.ids_T),
            self.target + len(talk.places_A),
        )

    def fits(self) -> bool:
        """Whether a row can hold this much."""
        return self.patch <= ROW_PATCHES and self.token <= ROW_TOKENS and self.target <= ROW_TARGETS


def put(batch: Batch, row: int, fill: Fill, talk: Talk) -> None:
    """Writes a talk into a row behind what is there."""
    grid_t, grid_h, grid_w = talk.grid_thw
    per_frame = grid_h * grid_w
    after = fill.after(talk)
    patches, tokens = slice(fill.patch, after.patch), slice(fill.token, after.token)
    coords_2P, index_4P, weight_4P = _tables(grid_h, grid_w)
    batch.patches_GPW[row, patches] = talk.patches_PW
    batch.coords_G2P[row, :, patches] = np.tile(coords_2P, (1, grid_t))
    batch.interp_index_G4P[row, :, patches] = np.tile(index_4P, (1, grid_t))
    batch.interp_weight_G4P[row, :, patches] = np.tile(weight_4P, (1, grid_t))
    first_P = fill.patch + np.repeat(np.arange(grid_t) * per_frame, per_frame)
    batch.bounds_G2P[row, :, patches] = np.stack([first_P, first_P + per_frame])
    batch.num_patches_G[row] = patches.stop
    batch.ids_GT[row, tokens] = talk.ids_T
    batch.positions_G3T[row, :, tokens] = talk.positions_3T
    cells = fill.patch // MERGE**2 + np.cumsum(talk.is_media_T) - 1
    batch.pool_row_GT[row, tokens] = np.where(talk.is_media_T, cells, -1)
    batch.segments_GT[row, tokens] = fill.segment
    batch.labels_GS3[row, fill.segment] = talk.labels
    batch.places_GA[row, fill.target : after.target] = fill.token + talk.places_A
    batch.targets_GA[row, fill.target : after.target] = talk.ids_T[talk.places_A + 1]


class TalkPool:
    """A fixed set of training talks, each made when it is first drawn and then kept.

    Args:
        maker: makes the talks.
        split: of the samples.
        num_pairs: pictures, and clips, in the pool.
        seed: of phrasings.
    """

    def __init__(self, maker: TalkMaker, split: Split, num_pairs: int, seed: int) -> None:
        self.maker, self.num_pairs, self.seed = maker, num_pairs, seed
        self.split: Split = split
        self.made: dict[tuple[bool, int], Talk] = {}

    def get(self, is_video: bool, index: int) -> Talk:
        """The talk about one sample."""
        key = is_video, index
        if key not in self.made:
            sample = (samples.video if is_video else samples.image)(self.split, index)
            rng = np.random.default_rng([self.seed, is_video, index])
            self.made[key] = self.maker.talk(sample, rng)
        return self.made[key]

    def stream(self, rng: np.random.Generator) -> Iterator[Talk]:
        """Random talks for ever, pictures and clips in turn."""
        for turn in itertools.count():
            yield self.get(turn % 2 == 1, int(rng.integers(self.num_pairs)))


def make_batch(pool: TalkPool, num_rows: int, step: int) -> Batch:
    """The training batch of a step: the same arguments give the same batch.

    Args:
        pool: the training set.
        num_rows: G.
        step: number of the batch, >= 0.
    """
    stream = pool.stream(np.random.default_rng([pool.seed, 2, step]))
    batch = empty(num_rows)
    talk = next(stream)
    for row in range(num_rows):
        fill = Fill()
        while fill.after(talk).fits():
            put(batch, row, fill, talk)
            fill = fill.after(talk)
            talk = next(stream)
    return batch
