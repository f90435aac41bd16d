"""The fixed questions: always the same, held out, in every file format that clients send."""

import base64
import io
from collections import Counter

import av
import numpy as np
import pytest
from PIL import Image

from tpu_vl.accuracy.suite import BUNDLED_TASKS, questions
from tpu_vl.demo import samples
from tpu_vl.errors import ConfigError


def decoded(url):
    return base64.b64decode(url.partition(",")[2])


def test_questions_are_fixed_and_shared_by_longer_runs():
    short, long = list(questions("bundled", 3)), list(questions("bundled", 4))
    assert short == long[: len(short)]


def test_every_task_has_as_many_questions():
    counts = Counter(q.task for q in questions("bundled", 5))
    assert counts == dict.fromkeys(BUNDLED_TASKS, 5)


def test_no_two_questions_share_a_medium():
    media = [str(q.content[0]) for q in questions("bundled", 20)]
    assert len(set(media)) == len(media)


def test_formats():
    asked = list(questions("bundled", 6))
    images = [q.content[0]["image_url"]["url"] for q in asked if q.task != "direction"]
    assert {url.partition(";")[0] for url in images} == {
        "data:image/png",
        "data:image/jpeg",
        "data:image/webp",
    }
    videos = [q.content[0]["video_url"]["url"] for q in asked if q.task == "direction"]
    assert sum(isinstance(url, list) for url in videos) == 2
    assert sum(url[:15] == "data:video/mp4;" for url in videos) == 4


def test_files_hold_the_held_out_samples():
    by_task = {q.task: q for q in questions("bundled", 1)}
    sample = samples.image("heldout", 0)
    image = Image.open(io.BytesIO(decoded(by_task["shape"].content[0]["image_url"]["url"])))
    assert image.tobytes() == sample.frames[0].tobytes()
    assert by_task["shape"].answer == sample.shape
    clip = samples.video("heldout", 20_000)
    data = decoded(by_task["direction"].content[0]["video_url"]["url"])
    with av.open(io.BytesIO(data), "r") as file:
        assert float(file.streams.video[0].average_rate or 0) == pytest.approx(clip.rate)
        frames = [f.to_ndarray(format="rgb24") for f in file.decode(video=0)]
    assert len(frames) == len(clip.frames)
    for frame, original in zip(frames, clip.frames, strict=True):
        error = np.abs(frame.astype(int) - np.asarray(original, dtype=int))
        assert error.mean() < 8
    assert by_task["direction"].answer == clip.direction


@pytest.mark.parametrize(("suite", "count"), [("none", 1), ("bundled", 0), ("bundled", 10_001)])
def test_wrong_arguments_are_named(suite, count):
    with pytest.raises(ConfigError, match=r"--suite none|--num-samples"):
        list(questions(suite, count))
