"""Samples as conversations: what the server would make of them, with several questions at once."""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tpu_vl.config import MediaLimits
from tpu_vl.demo import configs, words
from tpu_vl.demo.samples import FRAMES_PER_GROUP, Ask, Sample, Thing, clip_times, paired
from tpu_vl.vision.options import ImageOptions, VideoOptions
from tpu_vl.vision.positions import mrope_positions
from tpu_vl.vision.resize import (
    MediaPlan,
    patchify,
    plan_image,
    plan_video,
    resize_image,
)
from tpu_vl.vision.video import timestamp_text

MERGE = 2
IGNORE = -1
TRUNK = -1  # the branch of tokens that every branch of their talk sees

# What each merged cell is labelled with; class 0 of each is "nothing".
SHAPE_CLASS = {name: 1 + i for i, name in enumerate(words.SHAPES)}
COLOUR_CLASS = {name: 1 + i for i, name in enumerate(words.COLOURS)}
DIRECTION_CLASS = {name: 1 + i for i, name in enumerate(words.DIRECTIONS)}
CELL_LABELS = {"shape": 6, "colour": 7, "digit": 11, "place": 3, "middle": 2, "motion": 5}
_LEAST_COVER = 0.3  # of a cell, from which a thing counts as seen in it

_SYSTEM_SHARE = 0.12
_TEXT_FIRST_SHARE = 0.08
_SECOND_TURN_SHARE = 0.2
_VISION_END = "<|vision_end|>"

Turns = tuple[tuple[str, str], ...]


class Talk(NamedTuple):
    """One sample with its conversations, ready to be packed.

    They share their beginning, up to the media: the trunk. Each goes on in a branch of its own,
    which sees the trunk and itself, at the positions that it would have alone. Fields: patches of
    all media; the grid of each; ids, M-RoPE positions, whether a token stands for a merged cell,
    the branch of each token; the places whose next token belongs to an answer; a label of each
    cell for each of `CELL_LABELS`; whether the tower is told the cells' rows, or columns, in the
    reverse order.
    """

    patches_PW: np.ndarray
    grids: tuple[tuple[int, int, int], ...]
    ids_T: np.ndarray
    positions_3T: np.ndarray
    is_media_T: np.ndarray
    branch_T: np.ndarray
    places_A: np.ndarray
    labels_ML: np.ndarray
    mirrored: tuple[bool, bool] = (False, False)


class TalkMaker:
    """Turns samples into talks through the checkpoint's own template and tokenizer.

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
        self._tail = lru_cache(maxsize=20_000)(self._make_tail)

    def talk(
        self, sample: Sample, rng: np.random.Generator, max_branches: int, mirrored_share: float
    ) -> Talk:
        """Conversations about a sample, each of one or two questions in random phrasings.

        Args:
            sample: what is talked about.
            rng: chooses questions, phrasings, system prompt and the order of text and media.
            max_branches: conversations at most.
            mirrored_share: of pictures of two shapes, along each axis; in [0, 1].
        """
        text_first = rng.random() < _TEXT_FIRST_SHARE
        count = 1 if text_first else min(max_branches, len(sample.asks))
        chosen = [sample.asks[i] for i in rng.permutation(len(sample.asks))]
        branches = [self._turns(chosen[i:], rng) for i in range(count)]
        system = str(rng.choice(words.SYSTEM_PROMPTS)) if rng.random() < _SYSTEM_SHARE else None
        lead = branches[0][0][0] if text_first else ""
        talk = self.assemble(sample, system, branches, lead)
        if sample.kind != "two":
            return talk
        rows, columns = rng.random(2) < mirrored_share
        return talk._replace(mirrored=(bool(rows), bool(columns)))

    def _turns(self, asks: list[Ask], rng: np.random.Generator) -> Turns:
        count = 2 if len(asks) > 1 and rng.random() < _SECOND_TURN_SHARE else 1
        return tuple((ask.text(int(rng.integers(64))), ask.answer) for ask in asks[:count])

    def assemble(
        self, sample: Sample, system: str | None, branches: list[Turns], lead: str = ""
    ) -> Talk:
        """A talk of given conversations.

        Args:
            sample: what is talked about.
            system: system prompt; None for none.
            branches: questions and answers of each conversation.
            lead: the first question, where it stands in front of the media; there is one branch
                then.
        """
        plans, patches = zip(
            *[self._medium(sample, frames) for frames in sample.media], strict=True
        )
        trunk = self._trunk(sample, plans, system, lead)
        ids, branch, places = [*trunk], [TRUNK] * len(trunk), []
        for number, turns in enumerate(branches):
            tail, tail_places = self._tail(turns, bool(lead))
            places += [len(ids) + place for place in tail_places]
            ids += tail
            branch += [number] * len(tail)
        ids_T = np.asarray(ids, np.int32)
        branch_T = np.asarray(branch, np.int32)
        is_media_T = np.isin(ids_T, self.pad_ids)
        positions_3T = self._positions(ids_T, branch_T, is_media_T, plans)
        labels = [
            cell_labels(plan, frames, things)
            for plan, frames, things in zip(plans, sample.media, sample.things, strict=True)
        ]
        return Talk(
            patches_PW=np.concatenate(patches),
            grids=tuple(plan.grid_thw for plan in plans),
            ids_T=ids_T,
            positions_3T=positions_3T,
            is_media_T=is_media_T,
            branch_T=branch_T,
            places_A=np.asarray(places, np.int32),
            labels_ML=np.concatenate(labels),
        )

    def _trunk(
        self, sample: Sample, plans: tuple[MediaPlan, ...], system: str | None, lead: str
    ) -> list[int]:
        """Token ids up to the last medium."""
        kind = "video" if sample.is_clip else "image"
        content: list[dict[str, Any]] = [{"type": kind} for _ in plans]
        if lead:
            content.insert(0, {"type": "text", "text": lead})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        text = self.template.render(messages=messages, add_generation_prompt=False)
        text = text[: text.rindex(_VISION_END) + len(_VISION_END)]
        for plan in plans:
            pads = f"<|{kind}_pad|>" * plan.tokens_per_frame
            if sample.is_clip:
                times_s = clip_times(len(sample.media[0]), sample.rate)
                groups = [
                    f"{timestamp_text(t)}<|vision_start|>{pads}{_VISION_END}" for t in times_s
                ]
                # The template's own start and end stand around the groups.
                text = text.replace("<|video_pad|>", "".join(groups), 1)
            else:
                text = text.replace("<|image_pad|>", pads.replace("image_pad", "image pad"), 1)
        return self._encode(text.replace("image pad", "image_pad"))

    def _make_tail(self, turns: Turns, led: bool) -> tuple[list[int], list[int]]:
        """Token ids behind the media, and where the next one belongs to an answer or ends it."""
        messages: list[dict[str, Any]] = []
        for i, (question, answer) in enumerate(turns):
            content: list[dict[str, Any]] = [{"type": "text", "text": question}]
            if i == 0:
                content = [{"type": "image"}, *content[: 0 if led else 1]]
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": answer})
        text = self.template.render(messages=messages, add_generation_prompt=False)
        ids = self._encode(text[text.rindex(_VISION_END) + len(_VISION_END) :])
        places: list[int] = []
        size = len(self.opening)
        for start in range(len(ids)):
            if ids[start : start + size] == self.opening:
                first = start + size
                places.extend(range(first - 1, ids.index(self.end, first)))
        return ids, places

    def _positions(
        self,
        ids_T: np.ndarray,
        branch_T: np.ndarray,
        is_media_T: np.ndarray,
        plans: tuple[MediaPlan, ...],
    ) -> np.ndarray:
        """M-RoPE positions: every branch goes on where the trunk ends."""
        trunk = int(np.sum(branch_T == TRUNK))
        frames: list[tuple[int, int, int]] = []
        starts = np.flatnonzero(is_media_T)
        for plan in plans:
            for _ in range(plan.grid_thw[0]):
                frames.append((int(starts[0]), *plan.grid_thw[1:]))
                starts = starts[plan.tokens_per_frame :]
        trunk_3T, delta = mrope_positions(trunk, frames, MERGE)
        positions_3T = np.empty((3, len(ids_T)), np.int32)
        positions_3T[:, :trunk] = trunk_3T
        for number in range(int(branch_T.max()) + 1):
            (of_branch,) = np.nonzero(branch_T == number)
            positions_3T[:, of_branch] = trunk + delta + np.arange(len(of_branch))
        return positions_3T

    def _medium(self, sample: Sample, frames: Any) -> tuple[MediaPlan, np.ndarray]:
        """Grid and patches of a medium, as tpu_vl.vision makes them but for the filter of clips."""
        width, height = frames[0].size
        count = len(frames)
        if sample.is_clip:
            plan = plan_video(
                count, height, width, self.cfg, self.limits, self.video_options, param="video"
            )
            chosen = paired(count)
        else:
            plan = plan_image(
                height, width, self.cfg, self.limits, self.image_options, param="image"
            )
            chosen = [0]
        # The server filters clips as torch does, within 2 levels of this and several times slower.
        resized = [resize_image(np.asarray(frame), plan.height, plan.width) for frame in frames]
        return plan, patchify(np.stack([resized[i] for i in chosen]), plan, FRAMES_PER_GROUP)

    def _id(self, token: str) -> int:
        return self._encode(token)[0]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def cell_labels(plan: MediaPlan, frames: Any, things: tuple[tuple[Thing, ...], ...]) -> np.ndarray:
    """What each merged cell shows, int32 [cells, labels]: classes of `CELL_LABELS`.

    Args:
        plan: the medium's grid.
        frames: its pictures.
        things: what each frame shows; of a pair of frames the first one counts, and where its
            things go until the second one.
    """
    grid_t, rows, columns = plan.grid_thw[0], plan.grid_thw[1] // MERGE, plan.grid_thw[2] // MERGE
    labels = np.zeros((grid_t, rows, columns, len(CELL_LABELS)), np.int32)
    width, height = frames[0].size
    for group in range(grid_t):
        first = group * FRAMES_PER_GROUP
        last = min(first + FRAMES_PER_GROUP, len(things)) - 1
        of_group = {name: labels[group, ..., i] for i, name in enumerate(CELL_LABELS)}
        for thing, later in zip(things[first], things[last], strict=True):
            x, y = thing.centre[0] * columns / width, thing.centre[1] * rows / height
            across = _overlap(x, 0.85 * thing.half[0] * columns / width, columns)
            down = _overlap(y, 0.85 * thing.half[1] * rows / height, rows)
            cover = down[:, None] * across[None]
            middle = min(int(y), rows - 1), min(int(x), columns - 1)
            cover[middle] = 1.0
            seen = cover >= _LEAST_COVER
            of_group["colour"][seen] = COLOUR_CLASS[thing.colour]
            of_group["motion"][seen] = _motion(thing, later)
            if thing.name in SHAPE_CLASS:
                of_group["shape"][seen] = SHAPE_CLASS[thing.name]
            else:
                of_group["digit"][seen] = 1 + int(thing.name)
                of_group["place"][seen] = 1 + thing.place
            of_group["middle"][middle] = 1
    return labels.reshape(-1, len(CELL_LABELS))


def _motion(thing: Thing, later: Thing) -> int:
    """The class of the direction between two places along one axis; 0 where they are the same."""
    step = tuple(int(np.sign(b - a)) for a, b in zip(thing.centre, later.centre, strict=True))
    return next((DIRECTION_CLASS[n] for n, s in words.DIRECTIONS.items() if s == step), 0)


def _overlap(centre: float, half: float, count: int) -> np.ndarray:
    """Share of each unit interval [i, i + 1) that [centre - half, centre + half] covers."""
    edges = np.arange(count)
    low, high = np.maximum(edges, centre - half), np.minimum(edges + 1, centre + half)
    return np.maximum(0.0, high - low)
