"""The generator: seeded, split for good, and never ambiguous."""

import numpy as np
import pytest

from tpu_vl.demo import samples, words

NUM = 60


def images():
    return [samples.image("heldout", i) for i in range(NUM)]


def videos():
    return [samples.video("heldout", i) for i in range(NUM)]


def test_same_seed_same_sample():
    first, again = samples.video("train", 7), samples.video("train", 7)
    assert [f.tobytes() for f in first.frames] == [f.tobytes() for f in again.frames]
    assert first.answer("direction") == again.answer("direction")


def test_splits_and_kinds_share_no_seed():
    drawn = {
        samples.generator(split, kind, index).bytes(16)
        for split in ("train", "heldout")
        for kind in (0, 1)
        for index in range(200)
    }
    assert len(drawn) == 2 * 2 * 200


def test_sizes_and_lengths_span_what_is_promised():
    sides = [side for s in images() for side in s.frames[0].size]
    assert min(sides) >= 32
    assert max(sides) <= 512
    assert max(sides) > 350
    assert min(sides) < 45
    lengths = {len(s.frames) for s in videos()}
    assert min(lengths) == 2
    assert max(lengths) == 16


@pytest.mark.parametrize("make", [samples.image, samples.video])
def test_every_answer_occurs(make):
    made = [make("train", i) for i in range(150)]
    assert {s.shape for s in made} == set(words.SHAPES)
    assert {s.colour for s in made} == set(words.COLOURS)


def test_shape_stays_inside_the_frame():
    for sample in images() + videos():
        width, height = sample.frames[0].size
        for x, y in sample.centres:
            assert sample.radius <= x <= width - sample.radius
            assert sample.radius <= y <= height - sample.radius


def test_movement_is_along_one_axis_and_never_small():
    for sample in videos():
        assert sample.direction is not None
        step = words.DIRECTIONS[sample.direction]
        axis = 0 if step[0] else 1
        path = np.asarray(sample.centres)
        travel = (path[-1, axis] - path[0, axis]) * step[axis]
        assert travel >= sample.frames[0].size[axis] / 3 - 1e-6
        assert travel >= 10
        assert np.ptp(path[:, 1 - axis]) == 0
        assert np.all(np.diff(path[:, axis]) * step[axis] > 0)


def test_pixels_move_the_way_the_answer_says():
    for sample in videos():
        assert sample.direction is not None
        first, last = (np.asarray(sample.frames[i], np.float32) for i in (0, -1))
        rgb = np.asarray(words.COLOURS[sample.colour], np.float32)
        centres = []
        for frame in (first, last):
            near = np.abs(frame - rgb).max(axis=-1) < 40
            rows, columns = np.nonzero(near)
            centres.append((columns.mean(), rows.mean()))
        moved = np.subtract(centres[1], centres[0])
        axis = int(np.argmax(np.abs(moved)))
        step = words.DIRECTIONS[sample.direction]
        assert np.sign(moved[axis]) == step[axis]


def test_the_colour_is_the_nearest_of_all_colours():
    palette = np.asarray(list(words.COLOURS.values()), np.float32)
    names = list(words.COLOURS)
    for sample in images():
        x, y = (int(c) for c in sample.centres[0])
        pixel = np.asarray(sample.frames[0], np.float32)[y, x]
        distance = np.abs(palette - pixel).max(axis=-1)
        assert names[int(np.argmin(distance))] == sample.colour
        assert np.sort(distance)[1] > 2 * np.sort(distance)[0]


def test_a_still_picture_has_no_direction():
    with pytest.raises(ValueError, match="no direction"):
        samples.image("heldout", 0).answer("direction")


def test_articles():
    assert words.answer("both", shape="star", colour="orange") == "an orange star"
    assert words.answer("both", shape="star", colour="red") == "a red star"
