"""Qwen3-VL against transformers in float32: tower rows, DeepStack levels and logits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import (
    TOLERANCE,
    Prompt,
    Runner,
    hf_logits,
    hf_rows,
    medium,
)
from tpu_vl.models import ops, qwen3_vl

IMAGE = medium("image", 1, 4, 6, seed=1)
TALL = medium("image", 1, 8, 2, seed=2)
SMALL = medium("image", 1, 2, 4, seed=3)
VIDEO = medium("video", 3, 2, 4, seed=4)
LONG = medium("video", 2, 4, 4, seed=5)

PROMPTS: dict[str, Callable[[], Prompt]] = {
    "text": lambda: Prompt().text(19),
    "image": lambda: Prompt().text(15).add(IMAGE).text(4),
    "three_images": lambda: (
        Prompt().text(3).add(IMAGE).text(2).add(TALL).text(9).add(SMALL).text(2)
    ),
    "video": lambda: Prompt().text(15).add(VIDEO).text(3),
    "two_videos": lambda: Prompt().text(2).add(VIDEO).text(3).add(LONG).text(3),
    "image_video": lambda: Prompt().text(4).add(IMAGE).text(2).add(VIDEO).text(3),
    "video_image": lambda: Prompt().add(VIDEO).text(2).add(IMAGE).text(3),
    "video_image_video": lambda: Prompt().text(1).add(VIDEO).add(SMALL).text(2).add(LONG).text(1),
}


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference; shapes must agree."""
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_rows_equal_reference(name: str, runner: Runner, reference: Any) -> None:
    prompt = PROMPTS[name]()
    if prompt.frames:
        pool, rows_T = runner.prompt_pool(prompt)
        got = np.asarray(pool)[rows_T[rows_T >= 0]]
        want = hf_rows(reference, prompt.media)
        for column in range(3):  # the merger's vector and each DeepStack level
            assert difference(got[:, column], want[:, column]) <= TOLERANCE
    assert difference(runner.logits(prompt), hf_logits(reference, prompt)) <= TOLERANCE


def mutated(runner: Runner, prompt: Prompt, mutation: str) -> np.ndarray:
    """Logits of a prompt with one fault planted."""
    pool, rows_T = runner.prompt_pool(prompt)
    positions = prompt.positions
    if mutation == "zeroed_deepstack":
        pool = pool.at[:, 1:].set(0)
    elif mutation == "swapped_levels":
        pool = pool[:, np.array([0, 2, 1])]
    elif mutation == "flat_mrope":
        positions = np.tile(np.arange(len(prompt.ids), dtype=np.int32), (3, 1))
    elif mutation == "swapped_media":
        spans = [np.arange(s, s + h * w // 4) for s, h, w in prompt.frames]
        rows_T = rows_T.copy()
        rows_T[spans[0]], rows_T[spans[1]] = rows_T[spans[1]], rows_T[spans[0]].copy()
    return runner.step(runner.caches(), pool, [(prompt.ids, positions, rows_T, 0)])[0]


@pytest.mark.parametrize(
    "mutation", ["zeroed_deepstack", "swapped_levels", "flat_mrope", "swapped_media"]
)
def test_planted_fault_breaks_parity(mutation: str, runner: Runner, reference: Any) -> None:
    other = medium("image", 1, 4, 6, seed=9)
    prompt = Prompt().text(3).add(IMAGE).text(2).add(other).text(4)
    want = hf_logits(reference, prompt)
    assert difference(mutated(runner, prompt, "none"), want) <= TOLERANCE
    assert difference(mutated(runner, prompt, mutation), want) > 100 * TOLERANCE


def test_zeroed_deepstack_mergers_change_logits(runner: Runner) -> None:
    prompt = PROMPTS["image"]()
    vision = runner.params.vision
    off = runner.params.replace(
        vision=vision.replace(deepstack=jax.tree.map(lambda a: a * 0, vision.deepstack))
    )
    changed = Runner(off, runner.cfg, runner.backend.mesh)
    before, after = runner.logits(prompt), changed.logits(prompt)
    first = prompt.frames[0][0]
    np.testing.assert_array_equal(before[:first], after[:first])
    assert difference(before[first:], after[first:]) > 100 * TOLERANCE


def test_training_path_equals_serving(runner: Runner, reference: Any) -> None:
    prompt = PROMPTS["image"]()
    pool, rows_T = runner.prompt_pool(prompt)
    cfg, text = runner.cfg, runner.params.text
    order = jnp.arange(len(prompt.ids))
    seen_TT = order[:, None] >= order[None]

    def attend(q: Any, k: Any, v: Any, rope: Any, state: None) -> tuple[Any, None]:
        scale = cfg.text.head_dim**-0.5
        return ops.masked_attention(q, k, v, rope, seen_TT, scale=scale), state

    def forward(text: Any, pool: Any) -> Any:
        hidden, _ = qwen3_vl.text_layers(
            text,
            jnp.asarray(prompt.ids, jnp.int32),
            jnp.asarray(prompt.positions),
            pool,
            jnp.asarray(rows_T),
            (None,) * cfg.text.num_layers,
            attend,
            cfg=cfg,
            backend=runner.backend,
        )
        normed = qwen3_vl.final_norm(text, hidden, cfg=cfg)
        return qwen3_vl.logits(text.head_VD, normed, cfg=cfg, backend=runner.backend)

    got = np.asarray(jax.jit(forward)(text, pool))
    assert difference(got, hf_logits(reference, prompt)) <= TOLERANCE
