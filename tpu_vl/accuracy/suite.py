"""The fixed questions of a suite: held-out samples as the requests of a client."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tpu_vl.demo import samples, words
from tpu_vl.demo.encode import IMAGE_FORMATS, data_url, image_bytes, video_bytes
from tpu_vl.demo.samples import Ask, Sample
from tpu_vl.errors import ConfigError

# What each task is asked about, in turn; no two questions share a sample.
BUNDLED_TASKS: dict[str, tuple[str, ...]] = {
    "shape": ("one",),
    "colour": ("one",),
    "count": ("crowd",),
    "relation": ("two",),
    "describe": ("one", "two", "number"),
    "digit": ("digit",),
    "number": ("number",),
    "larger": ("pair",),
    "same": ("pair",),
    "which": ("pair",),
    "direction": ("move", "turn"),
    "order": ("turn",),
    "when": ("turn",),
    "second": ("one", "two"),
}
# Of "second": what was asked and answered before, and what is asked then, by kind of sample.
_SECOND = {"one": ("shape", "colour"), "two": ("relation", "shape_of")}
_TASK_STRIDE = 10_000
_SYSTEM_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request and its only right answer.

    Args:
        task: what is asked.
        index: number of the question in its task.
        messages: as the OpenAI API takes them.
        answer: the exact text of a right answer.
    """

    task: str
    index: int
    messages: list[dict[str, Any]]
    answer: str


def questions(suite: str, num_samples: int) -> Iterator[Question]:
    """The first questions of every task of a suite, always the same ones.

    Args:
        suite: a key of `SUITES`.
        num_samples: questions per task, in [1, 10000].

    Raises:
        ConfigError: an unknown suite or a number out of range, named.
    """
    if suite not in SUITES:
        raise ConfigError(f"--suite {suite} is not known; use one of {', '.join(SUITES)}")
    if not 1 <= num_samples <= _TASK_STRIDE:
        raise ConfigError(f"--num-samples {num_samples} is out of range; use 1 to {_TASK_STRIDE}")
    return SUITES[suite](num_samples)


def _bundled(num_samples: int) -> Iterator[Question]:
    for index in range(num_samples):
        for task in BUNDLED_TASKS:
            sample, asks = bundled_asks(task, index)
            yield Question(
                task=task,
                index=index,
                messages=_messages(sample, asks, index),
                answer=asks[-1].answer,
            )


def bundled_asks(task: str, index: int) -> tuple[Sample, list[Ask]]:
    """The held-out sample of a question, and what is asked, the last of it to be answered.

    Args:
        task: of `BUNDLED_TASKS`.
        index: number of the question in its task, in [0, 10000).
    """
    kinds = BUNDLED_TASKS[task]
    kind = kinds[index % len(kinds)]
    asked = _SECOND[kind] if task == "second" else (task,)
    seed = list(BUNDLED_TASKS).index(task) * _TASK_STRIDE + index
    while True:
        sample = samples.sample("heldout", kind, seed)
        found = [[ask for ask in sample.asks if ask.task == name] for name in asked]
        if all(found):
            # In turn: which of them comes first must not tell the answer.
            return sample, [asks[index // len(kinds) % len(asks)] for asks in found]
        # Two equal pictures have no "which"; the next seed is no other question's.
        seed += len(BUNDLED_TASKS) * _TASK_STRIDE


def _messages(sample: Sample, asks: list[Ask], index: int) -> list[dict[str, Any]]:
    """The conversation: every fifth with a system prompt, phrasings and file formats in turn."""
    messages: list[dict[str, Any]] = []
    if index % _SYSTEM_EVERY == _SYSTEM_EVERY - 1:
        prompts = words.SYSTEM_PROMPTS
        messages.append({"role": "system", "content": prompts[index % len(prompts)]})
    if sample.is_clip:
        content = [_video_part(sample, index)]
    else:
        content = [_image_part(frames[0], index) for frames in sample.media]
    for i, ask in enumerate(asks):
        content.append({"type": "text", "text": ask.text(index)})
        messages.append({"role": "user", "content": content})
        content = []
        if i < len(asks) - 1:
            messages.append({"role": "assistant", "content": ask.answer})
    return messages


def _image_part(image: Image.Image, index: int) -> dict[str, Any]:
    """PNG, JPEG and WebP in turn."""
    name = list(IMAGE_FORMATS)[index % len(IMAGE_FORMATS)]
    url = data_url(f"image/{name}", image_bytes(image, name))
    return {"type": "image_url", "image_url": {"url": url}}


def _video_part(sample: Sample, index: int) -> dict[str, Any]:
    """An MP4 file; every third clip is sent as the list of its frames and their rate instead."""
    frames = sample.media[0]
    if index % 3 == 2:
        urls = [data_url("image/png", image_bytes(frame, "png")) for frame in frames]
        return {"type": "video_url", "video_url": {"url": urls, "fps": sample.rate}}
    url = data_url("video/mp4", video_bytes(frames, sample.rate))
    return {"type": "video_url", "video_url": {"url": url}}


SUITES: dict[str, Callable[[int], Iterator[Question]]] = {"bundled": _bundled}
