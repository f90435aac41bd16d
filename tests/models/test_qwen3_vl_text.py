"""The language model in steps: chunks, mixed batches, decoding, and the text-only process."""

from typing import Any

import jax
import numpy as np
import pytest
from transformers import Qwen3VLTextModel

from tests.models import tiny
from tests.models.tiny import TOLERANCE, Prompt, Runner, hf_logits, medium
from tpu_vl.mesh import make_mesh
from tpu_vl.models import qwen3_vl
from tpu_vl.models.family import TextInputs
from tpu_vl.vision.positions import mrope_positions
from tpu_vl.weights.load import load_params

IMAGE = medium("image", 1, 8, 8, seed=11)
SMALL = medium("image", 1, 4, 4, seed=12)
OTHER = medium("image", 1, 4, 6, seed=13)


def in_chunks(runner: Runner, prompt: Prompt, ends: list[int]) -> np.ndarray:
    """Logits of a prompt whose steps end at the given token indices."""
    pool, rows_T = runner.prompt_pool(prompt)
    caches = runner.caches()
    outs = []
    for start, end in zip([0, *ends], [*ends, len(prompt.ids)], strict=False):
        part = (prompt.ids[start:end], prompt.positions[:, start:end], rows_T[start:end], start)
        out, caches = runner.step(caches, pool, [part])
        outs.append(out)
    return np.concatenate(outs)


def multiples(size: int, total: int) -> list[int]:
    """Chunk ends of a fixed size, without the last."""
    return list(range(size, total, size))


@pytest.mark.parametrize("chunk", [7, 32, 33, 96])
def test_chunked_prompt_equals_whole(chunk: int, runner: Runner, reference: Any) -> None:
    prompt = Prompt().text(28).add(IMAGE).text(60)  # 106 tokens; the image fills 29 to 45
    got = in_chunks(runner, prompt, multiples(chunk, len(prompt.ids)))
    np.testing.assert_allclose(got, runner.logits(prompt), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(got, hf_logits(reference, prompt), rtol=0, atol=TOLERANCE)


def test_image_larger_than_the_chunks_equals_whole(runner: Runner) -> None:
    prompt = Prompt().text(2).add(IMAGE).text(2)
    got = in_chunks(runner, prompt, multiples(5, len(prompt.ids)))
    np.testing.assert_allclose(got, runner.logits(prompt), rtol=0, atol=TOLERANCE)


def test_chunk_edges_inside_the_middle_image(runner: Runner, reference: Any) -> None:
    prompt = Prompt().text(3).add(SMALL).text(2).add(OTHER).text(2).add(SMALL).text(3)
    start, h, w = prompt.frames[1]
    count = h * w // 4
    ends = [start + 1, start + count // 2, start + count - 1]
    np.testing.assert_allclose(
        in_chunks(runner, prompt, ends), hf_logits(reference, prompt), rtol=0, atol=TOLERANCE
    )


def test_prefix_hit_inside_an_image_needs_only_the_rest_of_its_rows(runner: Runner) -> None:
    prompt = Prompt().text(3).add(IMAGE).text(4)
    pool, rows_T = runner.prompt_pool(prompt)
    cut = prompt.frames[0][0] + 10
    first = (prompt.ids[:cut], prompt.positions[:, :cut], rows_T[:cut], 0)
    _, caches = runner.step(runner.caches(), pool, [first])
    # Rows of the cached part are gone from the pool: the rest must not look at them.
    pool = pool.at[rows_T[:cut][rows_T[:cut] >= 0]].set(np.nan)
    rest = (prompt.ids[cut:], prompt.positions[:, cut:], rows_T[cut:], cut)
    out, _ = runner.step(caches, pool, [rest])
    np.testing.assert_allclose(out, runner.logits(prompt)[cut:], rtol=0, atol=TOLERANCE)


def test_positions_of_chunks_have_their_length() -> None:
    positions_3T, delta = mrope_positions(40, [(5, 8, 16)], 2)
    assert positions_3T[:, :32].shape == (3, 32)
    assert positions_3T[:, 32:].shape == (3, 8)
    assert delta == -24


def test_delta_is_of_the_whole_prompt_and_places_the_answer(runner: Runner, reference: Any) -> None:
    prompt = Prompt().text(5).add(IMAGE).text(3)
    length = len(prompt.ids)
    _, delta = mrope_positions(length, prompt.frames, tiny.MERGE)
    answer = [17, 42, 5]
    pool, rows_T = runner.prompt_pool(prompt)
    whole = (prompt.ids, prompt.positions, rows_T, 0)
    out, caches = runner.step(runner.caches(), pool, [whole])
    outs = [out[-1]]
    for i, token in enumerate(answer):
        position = np.full((3, 1), length + i + delta, np.int32)
        decode = ([token], position, np.full(1, -1, np.int32), length + i)
        out, caches = runner.step(caches, pool, [decode])
        outs.append(out[-1])
    prompt.ids += answer
    want = hf_logits(reference, prompt)[-len(answer) - 1 :]
    np.testing.assert_allclose(np.stack(outs), want, rtol=0, atol=TOLERANCE)


def test_mixed_batch_rows_equal_solo_runs(runner: Runner) -> None:
    """A decoding image row, a new image row and a text row in one step."""
    old, new, text = (
        Prompt().text(5).add(IMAGE).text(2),
        Prompt().text(2).add(OTHER).text(7),
        Prompt().text(21),
    )
    rows = np.arange(16 + 6, dtype=np.int32)
    frames = [old.patches[0], new.patches[0]]
    pool, _ = runner.encode(tiny.packed(frames, [(8, 8), (4, 6)], rows))
    old_rows, new_rows = old.pool_rows(rows[:16]), new.pool_rows(rows[16:])
    text_rows = np.full(21, -1, np.int32)
    last = len(old.ids) - 1
    first_part = (old.ids[:last], old.positions[:, :last], old_rows[:last], 0)
    _, caches = runner.step(runner.caches(), pool, [first_part])
    mixed, _ = runner.step(
        caches,
        pool,
        [
            (old.ids[last:], old.positions[:, last:], old_rows[last:], last),
            (new.ids, new.positions, new_rows, 0),
            (text.ids, text.positions, text_rows, 0),
        ],
    )
    want = np.concatenate([runner.logits(old)[last:], runner.logits(new), runner.logits(text)])
    np.testing.assert_allclose(mixed, want, rtol=0, atol=TOLERANCE)


def test_only_wanted_rows_reach_the_head(runner: Runner) -> None:
    """The hidden rows are those of `row_tokens_R`, however many tokens the step has."""
    cfg, params = runner.cfg, runner.params
    arrays: dict[str, Any] = {
        "ids_T": np.zeros(40, np.int32),
        "positions_XT": np.zeros((3, 40), np.int32),
        "pool_row_T": np.full(40, -1, np.int32),
        "page_table_BL": np.zeros((1, 8), np.int32),
        "q_starts_B": np.array([0, 40], np.int32),
        "kv_lens_B": np.array([40], np.int32),
        "row_tokens_R": np.array([39], np.int32),
    }
    hidden, _ = jax.eval_shape(
        lambda p, c, pool, i: qwen3_vl.text_step(p, c, pool, i, cfg=cfg, backend=runner.backend),
        params.text,
        runner.caches(),
        runner.pool(),
        TextInputs(**arrays),
    )
    assert hidden.shape == (1, cfg.text.width)


@pytest.mark.parametrize("source", ["with_vision_false", "no_vision_section", "text_type"])
def test_text_only_process_gives_the_text_models_logits(
    source: str, reference: Any, checkpoint: Any, tmp_path: Any
) -> None:
    config = reference.config.to_dict()
    folder = checkpoint
    if source == "with_vision_false":
        config["vision_config"] = "never looked at"
    elif source == "no_vision_section":
        del config["vision_config"]
    else:
        language = Qwen3VLTextModel(reference.config.text_config)
        language.load_state_dict(reference.model.language_model.state_dict())
        tied = config["text_config"] | {"tie_word_embeddings": True}
        language.save_pretrained(tmp_path)
        config, folder = tied, tmp_path
    cfg = qwen3_vl.parse_config(config, with_vision=source != "with_vision_false")
    assert cfg.vision is None
    mesh = make_mesh(1)
    params = load_params(folder, qwen3_vl.FAMILY, cfg, mesh, "float32")
    assert params.vision is None
    ids = Prompt().text(23).ids
    text_runner = Runner(params, cfg, mesh, "dense")
    positions_1T = np.arange(23, dtype=np.int32)[None]
    got, _ = text_runner.step(text_runner.caches(), None, [(ids, positions_1T, None, 0)])
    head = (
        reference.model.language_model.embed_tokens.weight
        if cfg.tie_word_embeddings
        else reference.lm_head.weight
    )
    want = tiny.hf_text_logits(reference, ids, head)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
