"""What the training script rests on: batches as a server makes them, updates, resuming."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tpu_vl.demo import CHECKPOINT, batches, objective, optimizer, samples, start, train


@pytest.fixture(scope="module")
def maker():
    return batches.TalkMaker(CHECKPOINT)


@pytest.fixture(scope="module")
def pool(maker):
    return batches.TalkPool(maker, "train", num_pairs=6, seed=1)


def test_a_talk_is_what_the_processor_makes_of_it(maker):
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoProcessor.from_pretrained(str(CHECKPOINT))
    for index in range(6):
        for sample in (samples.image("train", index), samples.video("train", index)):
            talk = maker.talk(sample, np.random.default_rng(index))
            text = maker.tokenizer.decode(talk.ids_T, skip_special_tokens=False)
            if sample.direction is None:
                text = _shorten(text, "<|image_pad|>")
                inputs = processor(text=[text], images=[sample.frames[0]], return_tensors="np")
                grid = inputs["image_grid_thw"][0]
            else:
                first = text.index("<|vision_start|>") + len("<|vision_start|>")
                text = f"{text[:first]}<|video_pad|>{text[text.rindex('<|vision_end|>') :]}"
                inputs = processor(
                    text=[text],
                    videos=[np.stack([np.asarray(f) for f in sample.frames]).transpose(0, 3, 1, 2)],
                    video_metadata=[
                        {
                            "fps": sample.rate,
                            "total_num_frames": len(sample.frames),
                            "frames_indices": list(range(len(sample.frames))),
                        }
                    ],
                    do_sample_frames=False,
                    return_tensors="np",
                )
                grid = inputs["video_grid_thw"][0]
            assert tuple(grid) == talk.grid_thw
            assert inputs["input_ids"][0].tolist() == talk.ids_T.tolist()


def _shorten(text: str, pad: str) -> str:
    first, last = text.index(pad), text.rindex(pad)
    return text[:first] + text[last:]


def test_targets_are_the_answers_and_their_ends(maker):
    sample = samples.image("train", 3)
    talk = maker.talk(sample, np.random.default_rng(0))
    said = maker.tokenizer.decode(talk.ids_T[talk.places_A + 1], skip_special_tokens=False)
    answers = said.split("<|im_end|>")
    assert answers.pop() == ""
    assert answers
    assert set(answers) <= {sample.answer(task) for task in ("shape", "colour", "both")}


def test_the_same_step_gives_the_same_batch(pool):
    first, again = batches.make_batch(pool, 2, 5), batches.make_batch(pool, 2, 5)
    other = batches.make_batch(pool, 2, 6)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.ids_GT, other.ids_GT)


def test_rows_hold_whole_samples(pool):
    batch = batches.make_batch(pool, 3, 0)
    for row in range(3):
        media = batch.pool_row_GT[row] >= 0
        cells = batch.num_patches_G[row] // batches.MERGE**2
        assert batch.pool_row_GT[row][media].tolist() == list(range(cells))
        labelled = (batch.labels_GS3[row, :, 0] >= 0).sum()
        assert labelled == batch.segments_GT[row].max() + 1 >= 2
        bounds = batch.bounds_G2P[row][:, : batch.num_patches_G[row]]
        places = np.arange(batch.num_patches_G[row])
        assert np.all((bounds[0] <= places) & (places < bounds[1]))
        for place, target in zip(batch.places_GA[row], batch.targets_GA[row], strict=True):
            assert target == batches.IGNORE or batch.ids_GT[row, place + 1] == target


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


def test_the_patch_embedding_whitens():
    rng = np.random.default_rng(0)
    mixed = rng.standard_normal((4000, 12)) @ rng.standard_normal((12, 12))
    pixels = np.clip(127.5 + 12 * mixed, 0, 255).astype(np.uint8)
    weight, bias = start._whitening(pixels, 12)
    rows = (pixels.astype(np.float32) / 127.5 - 1) @ weight + bias
    covariance = np.cov(rows, rowvar=False)
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(covariance - np.diag(np.diag(covariance)), 0, atol=1e-3)


def test_answers_are_single_tokens(maker):
    ids = objective.answer_ids(maker.tokenizer.get_vocab())
    assert [len(task) for task in ids] == [5, 6, 4]
    assert len({int(i) for task in ids for i in task}) == 15


def test_state_survives_the_file(tmp_path):
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    state = optimizer.start(params)
    train.save_state(tmp_path / "state.npz", params, state)
    blank = jax.tree.map(jnp.zeros_like, (params, state))
    loaded, loaded_state = train.load_state(tmp_path / "state.npz", blank)
    np.testing.assert_array_equal(loaded["w"], params["w"])
    assert int(loaded_state.step) == int(state.step)
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]


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
