"""The TPU kernel of vision attention in interpret mode: equality, raggedness, skips, VMEM."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from tests.kernels.test_vision_attention import SCALE, bounds_of, check, make_inputs, truth
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.kernels.interpret import COMPILER_OPTIONS, target
from tpu_vl.kernels.vision_attention import api, pallas_tpu, reference
from tpu_vl.kernels.vision_attention.blocks import (
    Blocks,
    formula,
    padded_rows,
    pick_blocks,
    vmem_bytes,
    vmem_limit_bytes,
)
from tpu_vl.kernels.vision_attention.cases import REAL, SMALL, Case
from tpu_vl.kernels.vision_attention.ranges import key_ranges
from tpu_vl.mesh import make_mesh

NUM_ROWS = 768
# Both have a narrow path; the second holds the keys in two chunks, the last one not full.
WHOLE = Blocks(queries=256, keys=256, tile=128, heads=2, chunk=768)
CHUNKED = Blocks(queries=256, keys=256, tile=128, heads=1, chunk=512)
BOTH = pytest.mark.parametrize("blocks", [WHOLE, CHUNKED], ids=["whole", "chunked"])


@functools.partial(jax.jit, static_argnames="blocks", compiler_options=COMPILER_OPTIONS)
def attend(*inputs: jax.Array, blocks: Blocks) -> jax.Array:
    return pallas_tpu.packed(*inputs, scale=SCALE, target=target(None), blocks=blocks)


@functools.partial(jax.jit, static_argnames="mesh", compiler_options=COMPILER_OPTIONS)
def attend_by_entry(*inputs: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    return api.vision_attention(*inputs, scale=SCALE, implementation="pallas", mesh=mesh)


def ragged(segments: tuple[int, ...], dtype: str = "float32") -> Case:
    return Case(num_rows=NUM_ROWS, num_heads=2, width=8, segments=segments, dtype=dtype)


@pytest.mark.parametrize("name", SMALL)
def test_every_case_equals_the_reference(name: str) -> None:
    case = SMALL[name]
    inputs = make_inputs(case)
    found = attend_by_entry(*inputs)
    exact = [x.astype(jnp.float32) for x in inputs[:3]]
    expected = reference.dense(*exact, *inputs[3:], scale=SCALE)
    check(found, np.asarray(expected), case.dtype)
    assert not np.asarray(found, np.float32)[sum(case.segments) :].any()


SIZES = st.one_of(
    st.just([]),
    st.just([1]),
    st.lists(st.sampled_from([1, 2, 63, 64, 127, 128, 129, 255, 256, 257, 512]), max_size=12),
    st.integers(300, 700).flatmap(lambda n: st.permutations([n, *[3] * 20])),
)


@BOTH
@settings(max_examples=12, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**31))
def test_any_raggedness_equals_the_truth(blocks: Blocks, sizes: list[int], seed: int) -> None:
    ends = np.cumsum(sizes)
    case = ragged(tuple(n for n, end in zip(sizes, ends, strict=True) if end <= NUM_ROWS))
    inputs = make_inputs(case, seed)
    check(attend(*inputs, blocks=blocks), truth(case, inputs), "float32")


@settings(max_examples=5, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**31))
def test_any_raggedness_in_bfloat16(sizes: list[int], seed: int) -> None:
    ends = np.cumsum(sizes)
    segments = tuple(n for n, end in zip(sizes, ends, strict=True) if end <= NUM_ROWS)
    case = ragged(segments, "bfloat16")
    inputs = make_inputs(case, seed)
    check(attend(*inputs, blocks=WHOLE), truth(case, inputs), "bfloat16")


def overflowing(case: Case) -> tuple[jax.Array, ...]:
    """Inputs where some rows' logits with themselves lie far below their largest ones."""
    q, k, v, *rest = make_inputs(case)
    q, k = q.at[5:700:3].multiply(-30), k.at[::7].set(q[::7] * 30)
    return q, k, v, *rest


@BOTH
@pytest.mark.parametrize(
    "segments", [(768,), (300, 400), (60,) * 12], ids=["one", "two", "windows"]
)
def test_sums_that_overflow_are_computed_again(blocks: Blocks, segments: tuple[int, ...]) -> None:
    case = ragged(segments)
    inputs = overflowing(case)
    q, k = (np.asarray(x, np.float64) for x in inputs[:2])
    used = sum(segments)
    logits = SCALE * np.einsum("pnh,qnh->npq", q[:used], k[:used])
    own = np.einsum("npp->np", logits)
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp2((logits.max(-1) - own).astype(np.float32))).any()
    # Logits of several thousands: float32 rounds them to about 1e-4.
    found = np.asarray(attend(*inputs, blocks=blocks), np.float64)
    np.testing.assert_allclose(found, truth(case, inputs), rtol=0, atol=2e-3)


@BOTH
def test_changing_one_image_leaves_the_others_bit_equal(blocks: Blocks) -> None:
    case = ragged((200, 300, 200))
    inputs = make_inputs(case)
    q, k, v, *rest = inputs
    changed = q.at[200:500].multiply(-30), k.at[200:500].multiply(30), v.at[200:500].add(1), *rest
    before, after = (np.asarray(attend(*x, blocks=blocks)) for x in (inputs, changed))
    others = np.r_[0:200, 500:NUM_ROWS]
    np.testing.assert_array_equal(before[others], after[others])
    assert (before[200:500] != after[200:500]).any(axis=(1, 2)).all()


@BOTH
def test_key_blocks_of_other_segments_are_not_visited(blocks: Blocks) -> None:
    """A masked key with a NaN value would leave its mark; one that is not visited does not."""
    case = ragged((256, 128, 128, 256))
    q, k, v, *rest = make_inputs(case)
    for poisoned, clean in (
        (np.r_[0:256], np.r_[256:768]),
        (np.r_[256:384], np.r_[384:768, 0:256]),
    ):
        inputs = q, k.at[poisoned].set(jnp.nan), v.at[poisoned].set(jnp.nan), *rest
        found = np.asarray(attend(*inputs, blocks=blocks))
        assert np.isfinite(found[clean]).all()
        assert np.isnan(found[poisoned]).all()


def test_there_is_no_race() -> None:
    case = ragged((300, 64, 64, 200))
    inputs = make_inputs(case)
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
    )
    run = functools.partial(pallas_tpu.packed, scale=SCALE, target=target(None), blocks=CHUNKED)
    with pltpu.force_tpu_interpret_mode(params):
        found = jax.jit(run, compiler_options=COMPILER_OPTIONS)(*inputs)
        check(found, truth(case, inputs), "float32")
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("num_heads", [8, 3])
def test_sharded_over_heads_equals_one_device(num_heads: int) -> None:
    case = Case(num_rows=64, num_heads=num_heads, width=8, segments=(30, 20))
    inputs = make_inputs(case)
    found = attend_by_entry(*inputs, mesh=make_mesh(2, jax.devices()[:2]))
    check(found, truth(case, inputs), "float32")


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES)
def test_ranges_cover_every_pair_and_full_blocks_hide_none(sizes: list[int]) -> None:
    ends = np.cumsum(sizes)
    segments = tuple(n for n, end in zip(sizes, ends, strict=True) if end <= NUM_ROWS)
    used = sum(segments)
    bounds = bounds_of(segments, NUM_ROWS)
    bounds[:, used:] = 0
    ranges = key_ranges(jnp.asarray(bounds), WHOLE)
    found = {name: np.asarray(value) for name, value in ranges._asdict().items()}
    seen = (np.arange(NUM_ROWS) >= bounds[0][:, None]) & (np.arange(NUM_ROWS) < bounds[1][:, None])
    size, tile = WHOLE.keys, WHOLE.tile
    for i in range(NUM_ROWS // WHOLE.queries):
        rows = seen[i * WHOLE.queries : (i + 1) * WHOLE.queries]
        first, last = found["first_I"][i] * size, found["last_I"][i] * size
        assert not rows[:, :first].any()
        assert not rows[:, last:].any()
        full = slice(found["full_first_I"][i] * size, found["full_last_I"][i] * size)
        assert first <= full.start <= full.stop <= last
        assert rows[rows.any(axis=1), full].all()
        for group in range(WHOLE.queries // tile):
            start = found["group_first_GI"][group, i] * tile
            stop = start + found["trips_I"][i] * tile
            mine = rows[group * tile : (group + 1) * tile]
            assert found["trips_I"][i] == 0 or not mine[:, :start].any()
            assert found["trips_I"][i] == 0 or not mine[:, stop:].any()


@pytest.mark.parametrize(
    ("segments", "full", "border", "narrow"),
    [
        ((16384,), 32 * 32, 0, 0),
        ((1024,) * 16, 16 * 2 * 2, 0, 0),
        ((16383, 1), 31 * 31, 31 + 32, 0),
        ((64,) * 256, 0, 0, 32),
        ((8192 + 100, 8192 - 100), 16 * 16 + 15 * 15, 16 + 32 + 15, 0),
        ((100,), 0, 0, 1),
        ((), 0, 0, 0),
    ],
)
def test_visited_blocks(segments: tuple[int, ...], full: int, border: int, narrow: int) -> None:
    num_rows, used = 16384, sum(segments)
    bounds = bounds_of(segments, num_rows)
    bounds[:, used:] = 0
    blocks = Blocks(queries=512, keys=512, tile=256, heads=4, chunk=num_rows)
    ranges = key_ranges(jnp.asarray(bounds), blocks)
    wide_I, full_I = ranges.last_I - ranges.first_I, ranges.full_last_I - ranges.full_first_I
    trips_I = np.asarray(ranges.trips_I)
    assert trips_I.sum() == narrow
    assert np.where(trips_I == 0, full_I, 0).sum() == full
    assert np.where(trips_I == 0, wide_I - full_I, 0).sum() == border


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", REAL)
def test_blocks_of_real_shapes_fit_and_divide(name: str, chip: str) -> None:
    case, limit_bytes = REAL[name], vmem_limit_bytes(CHIPS[chip])
    heads = case.num_heads // case.tp
    blocks = pick_blocks(case.num_rows, heads, case.width, case.dtype, CHIPS[chip])
    assert vmem_bytes(blocks, case.num_rows, case.width, case.dtype) <= limit_bytes
    assert heads % blocks.heads == 0
    assert blocks.chunk % blocks.keys == 0
    assert blocks.queries % blocks.tile == blocks.keys % blocks.tile == 0
    longest = max(blocks.queries, blocks.keys)
    assert padded_rows(case.num_rows, blocks) % longest == 0
    assert padded_rows(case.num_rows, blocks) - case.num_rows < longest


def test_as_many_heads_as_fit_share_a_step() -> None:
    heads = {chip: formula(4096, 16, 72, "bfloat16", CHIPS[chip]).heads for chip in CHIPS}
    assert heads == {"v5e": 16, "v5p": 8, "v6e": 16, "tpu7x": 8}
    assert formula(4096, 12, 72, "bfloat16", CHIPS["v6e"]).heads == 12
    few = formula(4096, 4, 72, "bfloat16", CHIPS["v6e"])
    assert (few.heads, few.queries) == (4, 1024)


def small_chip(vmem_bytes_: int) -> Any:
    return replace(CHIPS["v6e"], vmem_bytes=vmem_bytes_)


def test_blocks_shrink_with_the_vmem_and_the_result_stays() -> None:
    case = Case(num_rows=640, num_heads=4, width=24, segments=(400, 100))
    inputs = make_inputs(case)
    sizes = [pick_blocks(16384, 4, 24, "float32", small_chip(n << 20)) for n in (256, 64, 16, 4)]
    work = [(b.heads, b.chunk, b.queries) for b in sizes]
    assert work == sorted(work, reverse=True)
    assert len(set(work)) == len(work)
    tight = replace(target(None), chip=small_chip(5 << 19))
    assert pick_blocks(640, 4, 24, "float32", tight.chip).chunk < 640
    run = functools.partial(pallas_tpu.packed, scale=SCALE, target=tight)
    found = jax.jit(run, compiler_options=COMPILER_OPTIONS)(*inputs)
    check(found, truth(case, inputs), "float32")


def test_a_shape_that_cannot_fit_is_refused_with_the_numbers() -> None:
    inputs = make_inputs(SMALL["one_full"])
    tiny = replace(target(None), chip=small_chip(1 << 18))
    with pytest.raises(ValueError, match=r"64 patches.*needs \d+ bytes.*on v6e may take 196608"):
        pallas_tpu.packed(*inputs, scale=SCALE, target=tiny)


def mesh_of(platform: str, kind: str) -> Any:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(devices=np.asarray([device], object))


def test_a_kernel_is_compiled_for_tpus_interpreted_on_cpus_refused_elsewhere() -> None:
    assert target(mesh_of("tpu", "TPU v5 lite")).chip.name == "v5e"
    assert target(mesh_of("tpu", "TPU v5 lite")).interpret is False
    assert isinstance(target(make_mesh(1)).interpret, pltpu.InterpretParams)
    with pytest.raises(ValueError, match=r"on platform 'gpu'.*use 'blocked'"):
        target(mesh_of("gpu", "NVIDIA H200"))
