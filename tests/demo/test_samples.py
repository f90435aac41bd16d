"""The generator: seeded, split for good, and never ambiguous."""

from itertools import combinations

import numpy as np
import pytest

from tpu_vl.demo import glyphs, samples, words

NUM = 60
PICTURES = ("one", "two", "crowd", "digit", "number", "pair")
CLIPS = ("move", "turn")


def made(kind, split: samples.Split = "heldout", count=NUM):
    return [samples.sample(split, kind, i) for i in range(count)]


def answers(kind, task, count=NUM):
    return [ask.answer for s in made(kind, count=count) for ask in s.asks if ask.task == task]


@pytest.mark.parametrize("kind", samples.KINDS)
def test_same_seed_same_sample(kind):
    first, again = samples.sample("train", kind, 7), samples.sample("train", kind, 7)
    assert first.asks == again.asks
    assert [[f.tobytes() for f in m] for m in first.media] == [
        [f.tobytes() for f in m] for m in again.media
    ]


def test_splits_and_kinds_share_no_seed():
    drawn = {
        samples.generator(split, kind, index).bytes(16)
        for split in ("train", "heldout")
        for kind in samples.KINDS
        for index in range(100)
    }
    assert len(drawn) == 2 * len(samples.KINDS) * 100


def test_every_question_has_phrasings_that_fill_in():
    tasks = set()
    for kind in samples.KINDS:
        for sample in made(kind):
            for ask in sample.asks:
                texts = {ask.text(i) for i in range(len(words.QUESTIONS[ask.task]))}
                assert len(texts) == len(words.QUESTIONS[ask.task])
                assert not any("{" in text for text in texts)
                tasks.add(ask.task)
    assert tasks == set(words.QUESTIONS)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_sizes_are_what_is_promised(split):
    sizes = [m[0].size for kind in PICTURES for s in made(kind, split) for m in s.media]
    sides = [side for size in sizes for side in size]
    assert min(sides) >= 32
    assert max(max(size) / min(size) for size in sizes) <= samples.MAX_ASPECT
    assert max(max(size) / min(size) for size in sizes) > 2.5
    if split == "train":
        assert max(sides) <= samples.IMAGE_SIDES[1]
        assert not any(side % 4 for side in sides)
    else:
        assert samples.IMAGE_SIDES[1] < 600 < max(sides) <= samples.IMAGE_SIDES[2]
        assert any(side % 4 for side in sides)
    clips = [s for kind in CLIPS for s in made(kind, split, 150)]
    lengths = {len(s.media[0]) for s in clips}
    assert (min(lengths), max(lengths)) == samples.CLIP_FRAMES
    assert {s.rate for s in clips} == set(samples.CLIP_RATES)


def test_held_out_digits_have_fonts_that_training_never_draws():
    rng = np.random.default_rng(0)
    trained = {samples._font(rng, "train") for _ in range(2000)}
    held_out = {samples._font(rng, "heldout") for _ in range(2000)}
    unseen = set(range(glyphs.NUM_TRAINED_FONTS, glyphs.NUM_FONTS))
    assert trained == {*range(glyphs.NUM_TRAINED_FONTS), glyphs.OUTLINE_FONT}
    assert held_out == trained | unseen
    # No held-out font draws its digits like a trained one.
    fonts = [glyphs.font(number) for number in range(glyphs.NUM_FONTS)]
    assert len(set(fonts)) == glyphs.NUM_FONTS


@pytest.mark.parametrize(
    ("kind", "task", "expected"),
    [
        ("one", "shape", set(words.SHAPES)),
        ("one", "colour", set(words.COLOURS)),
        ("crowd", "count", set(words.COUNTS)),
        ("two", "relation", set(words.RELATIONS)),
        ("digit", "digit", set("0123456789")),
        ("pair", "larger", set(words.PLACES)),
        ("pair", "same", {"yes", "no"}),
        ("pair", "which", set(words.PLACES)),
        ("move", "direction", set(words.DIRECTIONS)),
    ],
)
def test_every_answer_occurs_and_none_is_a_safe_guess(kind, task, expected):
    drawn = answers(kind, task, 200)
    assert set(drawn) == expected
    assert max(drawn.count(a) for a in expected) / len(drawn) < 1.6 / len(expected)


def test_the_first_which_is_as_often_the_second_picture():
    first = [s.ask("which").answer for s in made("pair", count=120) if len(s.asks) > 2]
    assert 0.35 < first.count("first") / len(first) < 0.65


def test_things_stay_inside_the_picture():
    for kind in samples.KINDS:
        for sample in made(kind):
            for frames, shown in zip(sample.media, sample.things, strict=True):
                width, height = frames[0].size
                for thing in (thing for things in shown for thing in things):
                    x, y = thing.centre
                    assert thing.half[0] - 1e-6 <= x <= width - thing.half[0] + 1e-6
                    assert thing.half[1] - 1e-6 <= y <= height - thing.half[1] + 1e-6


def test_things_of_a_picture_do_not_touch():
    for sample in made("two") + made("crowd"):
        for a, b in combinations(sample.things[0][0], 2):
            assert np.hypot(*np.subtract(a.centre, b.centre)) > 1.1 * (a.half[0] + b.half[0])


def test_relations_are_clear_and_right():
    for sample in made("two"):
        by_name = {f"{t.colour} {t.name}": t for t in sample.things[0][0]}
        for ask in (ask for ask in sample.asks if ask.task == "relation"):
            first, second = by_name[ask.slots["first"]], by_name[ask.slots["second"]]
            offset = np.subtract(first.centre, second.centre)
            step = words.RELATIONS[ask.answer]
            axis = 0 if step[0] else 1
            assert offset[axis] * step[axis] > 0
            assert abs(offset[axis]) > 1.2 * abs(offset[1 - axis])


def test_counts_are_of_what_is_drawn():
    for sample in made("crowd"):
        assert sample.ask("count").answer == words.COUNTS[len(sample.things[0][0]) - 1]


def test_the_larger_one_is_clearly_larger():
    for sample in made("pair"):
        radii = [things[0][0].half[0] for things in sample.things]
        place = words.PLACES.index(sample.ask("larger").answer)
        assert radii[place] > 1.45 * radii[1 - place]


def test_movement_is_along_one_axis_and_never_small():
    for sample in made("move") + made("turn"):
        step = words.DIRECTIONS[sample.ask("direction").answer]
        axis = 0 if step[0] else 1
        path = np.asarray([things[0].centre for things in sample.things[0]])
        travel = (path[-1, axis] - path[0, axis]) * step[axis]
        assert travel >= sample.media[0][0].size[axis] / 3 - 1e-6
        assert np.ptp(path[:, 1 - axis]) == 0
        assert np.all(np.diff(path[:, axis]) * step[axis] > 0)


def test_colours_turn_where_the_answers_say():
    for sample in made("turn"):
        shown = [things[0].colour for things in sample.things[0]]
        order = list(dict.fromkeys(shown))
        assert sample.ask("order").answer == ", ".join(order)
        times_s = samples.clip_times(len(shown), sample.rate)
        for ask in (ask for ask in sample.asks if ask.task == "when"):
            first = shown.index(ask.slots["colour"])
            assert first % samples.FRAMES_PER_GROUP == 0
            assert ask.answer == f"{times_s[first // 2]:.1f} seconds"


def test_the_colour_is_the_nearest_of_all_colours():
    palette = np.asarray(list(words.COLOURS.values()), np.float32)
    names = list(words.COLOURS)
    for sample in made("one") + made("two") + made("turn"):
        for frame, things in zip(sample.media[0], sample.things[0], strict=True):
            for thing in things:
                x, y = (int(c) for c in thing.centre)
                pixel = np.asarray(frame, np.float32)[y, x]
                distance = np.abs(palette - pixel).max(axis=-1)
                assert names[int(np.argmin(distance))] == thing.colour
                assert np.sort(distance)[1] > 2 * np.sort(distance)[0]


def test_digits_leave_ink_in_their_boxes():
    for sample in made("digit") + made("number"):
        pixels = np.asarray(sample.media[0][0], np.float32)
        text = "".join(thing.name for thing in sample.things[0][0])
        assert text == sample.asks[0].answer
        for thing in sample.things[0][0]:
            rgb = np.asarray(words.COLOURS[thing.colour], np.float32)
            (x, y), (half_x, half_y) = thing.centre, thing.half
            box = pixels[
                int(y - half_y) : int(y + half_y) + 1, int(x - half_x) : int(x + half_x) + 1
            ]
            assert (np.abs(box - rgb).max(axis=-1) < 60).mean() > 0.05


def test_a_question_that_a_sample_has_not():
    with pytest.raises(ValueError, match="no direction; it has colour"):
        samples.sample("heldout", "one", 0).ask("direction")


def test_articles_and_sentences():
    assert words.sentence(words.named("orange", "star")) == "An orange star."
    assert words.named("red", "star") == "a red star"
