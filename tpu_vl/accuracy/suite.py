"""The fixed questions of a suite: held-out samples as the requests of a client."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tpu_vl.demo import samples, words
from tpu_vl.demo.encode import IMAGE_FORMATS, data_url, image_bytes, video_bytes
from tpu_vl.demo.samples import Sample
from tpu_vl.errors import ConfigError

# "direction" is about clips, the others are about pictures; no two tasks share a sample.
BUNDLED_TASKS = ("shape", "colour", "direction")
_TASK_STRIDE = 10_000


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request and its only right answer.

    Args:
        task: what is asked.
        index: number of the question in its task.
        content: parts of the user's message, as the OpenAI API takes them.
        answer: the exact text of a right answer.
    """

    task: str
    index: int
    content: list[dict[str, Any]]
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
        for number, task in enumerate(BUNDLED_TASKS):
            seed = number * _TASK_STRIDE + index
            if task == "direction":
                sample = samples.video("heldout", seed)
                media = _video_part(sample, index)
            else:
                sample = samples.image("heldout", seed)
                media = _image_part(sample, index)
            phrasings = words.QUESTIONS[task]
            text = {"type": "text", "text": phrasings[index % len(phrasings)]}
            yield Question(
                task=task, index=index, content=[media, text], answer=sample.answer(task)
            )


def _image_part(sample: Sample, index: int) -> dict[str, Any]:
    """PNG, JPEG and WebP in turn."""
    name = list(IMAGE_FORMATS)[index % len(IMAGE_FORMATS)]
    url = data_url(f"image/{name}", image_bytes(sample.frames[0], name))
    return {"type": "image_url", "image_url": {"url": url}}


def _video_part(sample: Sample, index: int) -> dict[str, Any]:
    """An MP4 file; every third clip is sent as the list of its frames and their rate instead."""
    if index % 3 == 2:
        frames = [data_url("image/png", image_bytes(frame, "png")) for frame in sample.frames]
        return {"type": "video_url", "video_url": {"url": frames, "fps": sample.rate}}
    url = data_url("video/mp4", video_bytes(sample))
    return {"type": "video_url", "video_url": {"url": url}}


SUITES: dict[str, Callable[[int], Iterator[Question]]] = {"bundled": _bundled}
