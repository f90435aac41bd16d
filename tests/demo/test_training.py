"""What the training script rests on: talks as a server makes them, updates, resuming."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tpu_vl.demo import (
    CHECKPOINT,
    batches,
    curves,
    objective,
    optimizer,
    samples,
    start,
    talks,
    train,
    words,
)


@pytest.fixture(scope="module")
def maker():
    return talks.TalkMaker(CHECKPOINT)


def batch_of(maker, num_rows=2, step=5):
    return batches.make_batch(maker, 1, num_rows, step)


@pytest.mark.parametrize("kind", samples.KINDS)
def test_every_branch_is_what_the_processor_makes_of_it(maker, kind):
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoProcessor.from_pretrained(str(CHECKPOINT))
    sample = samples.sample("train", kind, 3)
    turns: list[talks.Turns] = [((ask.text(1), ask.answer),) for ask in sample.asks[:2]]
    turns.append((*turns[0], *turns[1]))
    for system in (None, words.SYSTEM_PROMPTS[0]):
        talk = maker.assemble(sample, system, turns)
        for number, branch in enumerate(turns):
            inputs = processed(processor, sample, system, branch)
            chosen = (talk.branch_T == talks.TRUNK) | (talk.branch_T == number)
            assert inputs["input_ids"][0].tolist() == talk.ids_T[chosen].tolist()
            grids = inputs["video_grid_thw" if sample.is_clip else "image_grid_thw"]
            assert [tuple(grid) for grid in grids.tolist()] == list(talk.grids)
            alone = maker.assemble(sample, system, [branch])
            np.testing.assert_array_equal(alone.positions_3T, talk.positions_3T[:, chosen])


def processed(processor, sample, system, turns):
    """What transformers makes of one conversation."""
    content = [{"type": "video" if sample.is_clip else "image"} for _ in sample.media]
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
        messages.append({"role": "assistant", "content": answer})
        content = []
    text = processor.apply_chat_template(messages, tokenize=False)
    if not sample.is_clip:
        images = [frames[0] for frames in sample.media]
        return processor(text=[text], images=images, return_tensors="np")
    frames = np.stack([np.asarray(f) for f in sample.media[0]]).transpose(0, 3, 1, 2)
    metadata = {
        "fps": sample.rate,
        "total_num_frames": len(frames),
        "frames_indices": list(range(len(frames))),
    }
    return processor(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="np",
    )


def test_a_question_may_stand_before_the_picture(maker):
    sample = samples.sample("train", "one", 3)
    question = sample.asks[0].text(0)
    talk = maker.assemble(sample, None, [((question, "circle"),)], question)
    text = maker.tokenizer.decode(talk.ids_T, skip_special_tokens=False)
    assert text.startswith(f"<|im_start|>user\n{question}<|vision_start|>")
    assert "<|vision_end|><|im_end|>\n<|im_start|>assistant\ncircle<|im_end|>" in text


def test_targets_are_the_answers_and_their_ends(maker):
    sample = samples.sample("train", "two", 3)
    talk = maker.talk(sample, np.random.default_rng(0), 5, 0.0)
    said = maker.tokenizer.decode(talk.ids_T[talk.places_A + 1], skip_special_tokens=False)
    answers = said.split("<|im_end|>")
    assert answers.pop() == ""
    assert len(answers) >= 5
    assert set(answers) <= {ask.answer for ask in sample.asks}


def test_labels_are_where_the_things_are(maker):
    for kind in samples.KINDS:
        sample = samples.sample("train", kind, 4)
        talk = maker.assemble(sample, None, [(("a", "b"),)])
        shown = {(t.colour, t.name) for m in sample.things for things in m for t in things}
        shape, colour, digit, place, middle, motion = talk.labels_ML.T
        assert set(colour) - {0} <= {talks.COLOUR_CLASS[c] for c, _ in shown}
        digits = {1 + int(name) for _, name in shown if name.isdigit()}
        assert set(digit) - {0} == digits
        assert set(place) - {0} == set(range(1, 1 + len(sample.asks[0].answer)) if digits else ())
        assert set(shape) - {0} <= {talks.SHAPE_CLASS[n] for _, n in shown if not n.isdigit()}
        assert middle.sum() >= len(sample.media)
        directions = {talks.DIRECTION_CLASS[a.answer] for a in sample.asks if a.task == "direction"}
        assert set(motion) - {0} == directions
        assert len(colour) == sum(np.prod(grid) for grid in talk.grids) // talks.MERGE**2


def test_a_token_sees_its_trunk_and_its_own_branch():
    segments, branches = jnp.asarray([0, 0, 0, 0, 1, -1]), jnp.asarray([-1, -1, 0, 1, -1, -1])
    seen = np.asarray(objective._seen(segments, branches))
    expected = np.zeros((6, 6), bool)
    for token, others in enumerate([[0], [0, 1], [0, 1, 2], [0, 1, 3], [4], [5]]):
        expected[token, others] = True
    np.testing.assert_array_equal(seen, expected)


def test_branches_answer_as_they_would_alone(maker):
    sample = samples.sample("train", "two", 3)
    turns = [((ask.text(1), ask.answer),) for ask in sample.asks[:3]]
    cfg = train.parsed_config(CHECKPOINT)
    backend = objective.training_backend()
    params = start.random(cfg, backend, 0)

    def logits(branches):
        batch = batches.empty(1)
        batches.put(batch, 0, batches.Fill(), maker.assemble(sample, None, branches), 0)
        row = jax.tree.map(lambda a: a[0], batch)
        found, _ = objective.answer_logits(params, row, cfg, backend)
        return np.asarray(found)[batch.targets_GA[0] >= 0]

    together = logits(turns)
    alone = np.concatenate([logits([branch]) for branch in turns])
    np.testing.assert_allclose(together, alone, atol=2e-5)


def test_the_same_step_gives_the_same_batch(maker):
    first, again, other = batch_of(maker), batch_of(maker), batch_of(maker, step=6)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.ids_GT, other.ids_GT)


def test_rows_hold_whole_talks(maker):
    batch = batch_of(maker, 3)
    for row in range(3):
        media = batch.pool_row_GT[row] >= 0
        cells = batch.num_patches_G[row] // talks.MERGE**2
        assert batch.pool_row_GT[row][media].tolist() == list(range(cells))
        labelled = batch.labels_GML[row, :, 0] >= 0
        assert labelled.tolist() == (np.arange(len(labelled)) < cells).tolist()
        bounds = batch.bounds_G2P[row][:, : batch.num_patches_G[row]]
        places = np.arange(batch.num_patches_G[row])
        assert np.all((bounds[0] <= places) & (places < bounds[1]))
        for place, target in zip(batch.places_GA[row], batch.targets_GA[row], strict=True):
            assert target == talks.IGNORE or batch.ids_GT[row, place + 1] == target


def test_a_mirrored_talk_has_the_places_of_its_cells_in_reverse():
    coords_2P, index_4P, _ = batches._tables(4, 6, (False, False))
    turned_2P, turned_4P, _ = batches._tables(4, 6, (False, True))
    np.testing.assert_array_equal(turned_2P[0], coords_2P[0])
    np.testing.assert_array_equal(turned_2P[1] // 2, 2 - coords_2P[1] // 2)
    np.testing.assert_array_equal(turned_2P[1] % 2, coords_2P[1] % 2)
    assert sorted(map(tuple, turned_4P.T)) == sorted(map(tuple, index_4P.T))
    upside_2P, _, _ = batches._tables(4, 6, (True, False))
    np.testing.assert_array_equal(upside_2P[0] // 2, 1 - coords_2P[0] // 2)


def test_only_pictures_of_two_shapes_are_mirrored(maker):
    def share(kind):
        rng = np.random.default_rng(0)
        made = [maker.talk(samples.sample("train", kind, i), rng, 1, 0.4) for i in range(60)]
        return np.mean([talk.mirrored for talk in made])

    assert 0.25 < share("two") < 0.55
    assert share("crowd") == share("number") == 0


def test_the_largest_samples_fit_a_row(maker):
    for kind in samples.KINDS:
        for index in range(60):
            sample = samples.sample("train", kind, index)
            talk = maker.talk(sample, np.random.default_rng(index), batches.MAX_BRANCHES, 0.4)
            assert batches.Fill().after(talk).fits()


def test_the_mix_begins_with_the_simple_and_has_every_kind():
    first, last = batches.mix(0), batches.mix(train.NUM_STEPS)
    for shares in (first, last):
        assert shares.sum() == pytest.approx(1)
        assert shares.min() > 0
    one = list(samples.KINDS).index("one")
    assert first[one] > 2 * last[one]
    np.testing.assert_array_equal(batches.mix(batches._MIX_STEPS[-1]), last)


def test_update_is_adamw():
    peak, steps = 0.1, 10_000
    params = {"w": jnp.asarray([[1.0, -2.0]]), "b": jnp.asarray([3.0])}
    gradients = {"w": jnp.asarray([[0.1, -0.2]]), "b": jnp.asarray([0.0])}
    new, state = optimizer.update(
        params, gradients, optimizer.start(params), peak=peak, num_steps=steps
    )
    rate = peak / optimizer.WARMUP_STEPS
    # After one step both corrected moments are the gradient's own: the direction is its sign.
    expected = params["w"] - rate * (np.sign(gradients["w"]) + optimizer.WEIGHT_DECAY * params["w"])
    np.testing.assert_allclose(new["w"], expected, rtol=1e-5)
    np.testing.assert_array_equal(new["b"], params["b"])
    assert int(state.step) == 1


def test_large_gradients_are_clipped_as_one():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    gradients = {"a": jnp.asarray([30.0, 0.0]), "b": jnp.asarray([0.0, 40.0])}
    _, state = optimizer.update(params, gradients, optimizer.start(params), peak=1.0, num_steps=9)
    mean = np.concatenate([state.mean["a"], state.mean["b"]]) / (1 - optimizer.BETA1)
    np.testing.assert_allclose(mean, [0.6, 0, 0, 0.8], rtol=1e-5)


def test_the_rate_warms_up_holds_and_falls_to_zero():
    rates = [
        float(optimizer.learning_rate(jnp.asarray(s), 2.0, 4000)) for s in (0, 1000, 3500, 4000)
    ]
    assert rates == pytest.approx([2.0 / optimizer.WARMUP_STEPS, 2.0, 1.0, 0.0])


def test_the_patch_embedding_whitens_what_stays_and_what_changes():
    rng = np.random.default_rng(0)
    mixed = rng.standard_normal((4000, 96)) @ rng.standard_normal((96, 96))
    patches = np.clip(127.5 + 4 * mixed, 0, 255).astype(np.uint8)
    moving = start._CHANGE_COMPONENTS
    weight, bias = start._embedding(patches, 48 + moving)

    def rows_of(pixels):
        return (pixels.reshape(-1, 96).astype(np.float32) / 127.5 - 1) @ weight + bias

    rows = rows_of(patches)
    np.testing.assert_allclose(rows[:, :48].mean(axis=0), 0, atol=1e-3)
    for part in (rows[:, :48], rows[:, 48:]):
        covariance = np.cov(part, rowvar=False)
        assert np.diag(covariance).min() > 0.1
        np.testing.assert_allclose(covariance - np.diag(np.diag(covariance)), 0, atol=2e-3)
    still = patches.reshape(-1, 3, 2, 16).copy()
    still[:, :, 1] = still[:, :, 0]
    np.testing.assert_allclose(rows_of(still)[:, 48:], 0, atol=1e-4)


def test_state_survives_the_file(tmp_path):
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    state = optimizer.start(params)
    train.save_state(tmp_path / "state.npz", params, state)
    blank = jax.tree.map(jnp.zeros_like, (params, state))
    loaded, loaded_state = train.load_state(tmp_path / "state.npz", blank)
    np.testing.assert_array_equal(loaded["w"], params["w"])
    assert int(loaded_state.step) == int(state.step)
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]


def test_the_log_of_a_resumed_run_has_no_line_twice(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (50, 100, 150)))
    train._Log(path, 100)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [50, 100]


def test_curves_end_where_the_log_does(tmp_path):
    path = tmp_path / "log.jsonl"

    def written(last):
        with path.open("w") as file:
            for step in range(50, 550, 50):
                share = 0.1 if step < 500 else last
                line = {"step": step, "loss": 2.0, **dict.fromkeys(train.COUNTED, share)}
                file.write(json.dumps(line) + "\n")
        return np.asarray(curves.draw(path))

    low, high = written(0.1), written(0.9)
    assert low.shape == high.shape
    assert not np.array_equal(low, high)


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_EVERY", 2)
    train.train(tmp_path / "whole", num_steps=4, resume=False)

    class Broken(Exception):
        pass

    def save_and_break(path, params, state):
        save(path, params, state)
        raise Broken

    save = train.save_state
    monkeypatch.setattr(train, "save_state", save_and_break)
    with pytest.raises(Broken):
        train.train(tmp_path / "resumed", num_steps=4, resume=False)
    monkeypatch.setattr(train, "save_state", save)
    train.train(tmp_path / "resumed", num_steps=4, resume=True)
    whole, resumed = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed")
    )
    assert whole.keys() == resumed.keys()
    for key, array in whole.items():
        np.testing.assert_array_equal(array, resumed[key])
