"""The tower: picture sizes, layer slices, packing, capacities and the gradient path."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import tiny
from tests.models.tiny import TOLERANCE, Runner, hf_rows, medium, packed
from tpu_vl.models import qwen3_vl
from tpu_vl.models.family import Backend

FRAMES = [(4, 6), (8, 2), (2, 4)]


def encode_alone(runner: Runner, grid: tuple[int, int], seed: int, capacity: int) -> np.ndarray:
    """The rows of one picture in a call of its own."""
    item = medium("image", 1, *grid, seed=seed)
    count = grid[0] * grid[1] // 4
    pool, _ = runner.encode(packed([item.patches_PW], [grid], np.arange(count), capacity))
    return np.asarray(pool)[:count]


@pytest.mark.parametrize(
    "side",
    [448, 1024, pytest.param(4096, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_square_picture_equals_reference(side: int, runner: Runner, reference: Any) -> None:
    cells = side // 16
    item = medium("image", 1, cells, cells, seed=side)
    count = cells * cells // 4
    inputs = packed([item.patches_PW], [(cells, cells)], np.arange(count), cells * cells)
    backend = Backend(runner.backend.mesh, "blocked", "blocked", math.gcd(cells * cells, 1024))
    run = jax.jit(qwen3_vl.encode_step, static_argnames=("cfg", "backend"))
    pool, _ = run(
        runner.params.vision,
        jnp.zeros((count, 3, 40)),
        jnp.zeros((cells * cells, 48)),
        inputs,
        cfg=runner.cfg,
        backend=backend,
    )
    np.testing.assert_allclose(pool, hf_rows(reference, [item]), rtol=0, atol=TOLERANCE)


def frames(seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Patches of three frames and scattered pool rows for them."""
    patches = [
        medium("image", 1, h, w, seed=seed + i).patches_PW for i, (h, w) in enumerate(FRAMES)
    ]
    return patches, np.random.default_rng(1).permutation(tiny.POOL_ROWS)[:12]


@pytest.mark.parametrize("edges", [(0, 1, 2, 3, 4, 5), (0, 2, 5), (0, 4, 5)])
def test_layer_slices_equal_the_whole(edges: tuple[int, ...], runner: Runner) -> None:
    patches, rows = frames()
    whole, _ = runner.encode(packed(patches, FRAMES, rows))
    pool, hidden = runner.pool(), None
    for layers in itertools.pairwise(edges):
        pool, hidden = runner.encode(packed(patches, FRAMES, rows, layers=layers), pool, hidden)
    np.testing.assert_allclose(pool, whole, rtol=0, atol=1e-6)


def test_packed_frames_equal_each_alone(runner: Runner) -> None:
    patches, rows = frames()
    pool, _ = runner.encode(packed(patches, FRAMES, rows))
    done = 0
    for i, (h, w) in enumerate(FRAMES):
        count = h * w // 4
        alone = encode_alone(runner, (h, w), seed=i, capacity=tiny.CAPACITY)
        got = np.asarray(pool)[rows[done : done + count]]
        np.testing.assert_allclose(got, alone, rtol=0, atol=1e-5)
        done += count


def test_a_frame_does_not_see_its_neighbour(runner: Runner) -> None:
    patches, rows = frames()
    before, _ = runner.encode(packed(patches, FRAMES, rows))
    patches[1] = 255 - patches[1]
    after, _ = runner.encode(packed(patches, FRAMES, rows))
    own = np.concatenate([rows[:6], rows[10:]])
    np.testing.assert_array_equal(np.asarray(before)[own], np.asarray(after)[own])
    assert np.abs(np.asarray(before - after)[rows[6:10]]).max() > 0.1


@pytest.mark.parametrize("capacity", [64, 256, 512])
def test_a_picture_is_equal_in_every_capacity(capacity: int, runner: Runner) -> None:
    want = encode_alone(runner, (4, 6), seed=7, capacity=tiny.CAPACITY)
    got = encode_alone(runner, (4, 6), seed=7, capacity=capacity)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_frame_may_fill_the_capacity(runner: Runner, reference: Any) -> None:
    item = medium("image", 1, 8, 16, seed=3)
    got = encode_alone(runner, (8, 16), seed=3, capacity=tiny.CAPACITY)
    np.testing.assert_allclose(got, hf_rows(reference, [item]), rtol=0, atol=TOLERANCE)


def test_padding_and_dropped_rows_write_nothing(runner: Runner) -> None:
    patches, rows = frames()
    marked = jnp.full_like(runner.pool(), 7.0)
    dropped = rows.copy()
    dropped[[0, 11]] = -1
    dropped[dropped == tiny.POOL_ROWS - 1] = -1
    pool, _ = runner.encode(packed(patches, FRAMES, dropped), marked)
    untouched = np.setdiff1d(np.arange(tiny.POOL_ROWS), dropped)
    assert tiny.POOL_ROWS - 1 in untouched  # where a wrapped -1 would have written
    np.testing.assert_array_equal(np.asarray(pool)[untouched], 7.0)
    assert not np.any(np.asarray(pool)[dropped[dropped >= 0]] == 7.0)


def test_static_tower_equals_encode_step_and_has_gradients(runner: Runner) -> None:
    patches, _ = frames()
    inputs = packed(patches, FRAMES, np.arange(12))
    pool, _ = runner.encode(inputs)

    def total(vision: Any) -> tuple[jax.Array, jax.Array]:
        rows = qwen3_vl.tower(vision, inputs, cfg=runner.cfg, backend=runner.backend)[:12]
        return jnp.sum(jnp.sin(rows)), rows

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, rows), gradients = run(runner.params.vision)
    np.testing.assert_allclose(rows, np.asarray(pool)[:12], rtol=0, atol=1e-5)
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0


def test_bfloat16_stays_near_float32(runner: Runner) -> None:
    patches, rows = frames()
    want, _ = runner.encode(packed(patches, FRAMES, rows))
    vision = jax.tree.map(lambda a: a.astype(jnp.bfloat16), runner.params.vision)
    low = Runner(runner.params.replace(vision=vision), runner.cfg, runner.backend.mesh)
    pool, hidden = low.encode(
        packed(patches, FRAMES, rows),
        low.pool().astype(jnp.bfloat16),
        jnp.zeros((tiny.CAPACITY, 48), jnp.bfloat16),
    )
    assert pool.dtype == hidden.dtype == jnp.bfloat16
    error = np.abs(np.asarray(pool, np.float32) - np.asarray(want)).max()
    assert error < 0.05 * np.abs(np.asarray(want)).max()
