"""The fixed questions: always the same, held out, in every file format that clients send."""

import base64
import io
from collections import Counter

import av
import numpy as np
import pytest
from PIL import Image

from tpu_vl.accuracy.suite import BUNDLED_TASKS, bundled_asks, questions
from tpu_vl.errors import ConfigError


def decoded(url):
    return base64.b64decode(url.partition(",")[2])


def test_questions_are_fixed_and_shared_by_longer_runs():
    short, long = list(questions("bundled", 3)), list(questions("bundled", 4))
    assert short == long[: len(short)]


def test_every_task_has_as_many_questions():
    counts = Counter(q.task for q in questions("bundled", 5))
    assert counts == dict.fromkeys(BUNDLED_TASKS, 5)


def media(question):
    """The media parts of a question, in order."""
    parts = [part for m in question.messages if m["role"] == "user" for part in m["content"]]
    return [part for part in parts if part["type"] != "text"]


def test_no_two_questions_share_a_medium():
    found = [str(media(q)) for q in questions("bundled", 15)]
    assert len(set(found)) == len(found)


def test_no_answer_is_right_for_most_questions_of_a_task():
    """A model that says the same whatever it sees must fail."""
    halves = ("larger", "same", "which")
    for task in BUNDLED_TASKS:
        answers = Counter(bundled_asks(task, index)[1][-1].answer for index in range(60))
        assert answers.most_common(1)[0][1] <= (42 if task in halves else 26), task


def test_a_conversation_ends_with_the_question():
    for question in questions("bundled", 10):
        last = question.messages[-1]
        assert last["role"] == "user"
        assert last["content"][-1]["type"] == "text"
        said = [m["content"] for m in question.messages if m["role"] == "assistant"]
        assert len(said) == (question.task == "second")
        assert len(media(question)) == (2 if question.task in ("larger", "same", "which") else 1)
        systems = sum(m["role"] == "system" for m in question.messages)
        assert systems == (question.index % 5 == 4)


def test_formats():
    asked = list(questions("bundled", 6))
    parts = [part for q in asked for part in media(q)]
    images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert {url.partition(";")[0] for url in images} == {
        "data:image/png",
        "data:image/jpeg",
        "data:image/webp",
    }
    videos = [part["video_url"]["url"] for part in parts if part["type"] == "video_url"]
    assert sum(isinstance(url, list) for url in videos) == 2 * 3
    assert sum(url[:15] == "data:video/mp4;" for url in videos) == 4 * 3


def test_files_hold_the_held_out_samples():
    by_task = {q.task: q for q in questions("bundled", 1)}
    sample, asks = bundled_asks("shape", 0)
    (part,) = media(by_task["shape"])
    image = Image.open(io.BytesIO(decoded(part["image_url"]["url"])))
    assert image.tobytes() == sample.media[0][0].tobytes()
    assert by_task["shape"].answer == asks[-1].answer == sample.things[0][0][0].name
    clip, asks = bundled_asks("direction", 0)
    (part,) = media(by_task["direction"])
    with av.open(io.BytesIO(decoded(part["video_url"]["url"])), "r") as file:
        assert float(file.streams.video[0].average_rate or 0) == pytest.approx(clip.rate)
        frames = [f.to_ndarray(format="rgb24") for f in file.decode(video=0)]
    assert len(frames) == len(clip.media[0])
    for frame, original in zip(frames, clip.media[0], strict=True):
        error = np.abs(frame.astype(int) - np.asarray(original, dtype=int))
        assert error.mean() < 8
    assert by_task["direction"].answer == asks[-1].answer


@pytest.mark.parametrize(("suite", "count"), [("none", 1), ("bundled", 0), ("bundled", 10_001)])
def test_wrong_arguments_are_named(suite, count):
    with pytest.raises(ConfigError, match=r"--suite none|--num-samples"):
        list(questions(suite, count))
