"""Vision attention: every implementation against a numpy truth, with NaN behind the valid rows."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_vl.kernels.vision_attention import api, reference
from tpu_vl.kernels.vision_attention.cases import SMALL, Case
from tpu_vl.mesh import make_mesh

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
SCALE = 0.3


def make_inputs(case: Case, seed: int = 0) -> tuple[jax.Array, ...]:
    """q, k, v, bounds and the count of a case; NaN from the first padding row on."""
    rng = np.random.default_rng(seed)
    used = sum(case.segments)
    qkv = rng.normal(size=(3, case.num_rows, case.num_heads, case.width)).astype(np.float32)
    qkv[:, used:] = np.nan
    q, k, v = (jnp.asarray(x, case.dtype) for x in qkv)
    return q, k, v, jnp.asarray(bounds_of(case.segments, case.num_rows)), jnp.int32(used)


def bounds_of(segments: tuple[int, ...], num_rows: int) -> np.ndarray:
    """First and one-past-last patch of each patch's segment; padding is a segment of its own."""
    ends = np.cumsum(segments, dtype=np.int32)
    used = sum(segments)
    bounds = np.tile(np.array([[used], [num_rows]], np.int32), (1, num_rows))
    for end, size in zip(ends, segments, strict=True):
        bounds[:, end - size : end] = [[end - size], [end]]
    return bounds


def truth(case: Case, inputs: tuple[jax.Array, ...], *, drop_mask: bool = False) -> np.ndarray:
    """Attention of each segment alone in float64; `drop_mask` plants a fault."""
    q, k, v = (np.asarray(x, np.float64) for x in inputs[:3])
    out = np.zeros_like(q)
    used, start = sum(case.segments), 0
    for size in case.segments:
        rows = slice(start, start + size)
        keys = slice(0, used) if drop_mask else rows
        logits = SCALE * np.einsum("pnh,qnh->npq", q[rows], k[keys])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[rows] = np.einsum("npq,qnh->pnh", weights, v[keys])
        start += size
    return out


def check(found: jax.Array, expected: np.ndarray, dtype: str) -> None:
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=TOLERANCE[dtype]
    )


@functools.partial(jax.jit, static_argnames=("implementation", "mesh"))
def attend(*inputs, implementation, mesh=None):
    return api.vision_attention(*inputs, scale=SCALE, implementation=implementation, mesh=mesh)


small_blocks = jax.jit(functools.partial(reference.blocked, scale=SCALE, block=16))


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
@pytest.mark.parametrize("name", SMALL)
def test_every_case_equals_the_truth(name: str, implementation: str) -> None:
    case = SMALL[name]
    inputs = make_inputs(case)
    found = attend(*inputs, implementation=implementation)
    check(found, truth(case, inputs), case.dtype)
    assert not np.asarray(found, np.float32)[sum(case.segments) :].any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 4, 15, 16, 17, 32, 60]), max_size=40),
    st.integers(0, 2**31),
)
def test_any_raggedness_equals_the_truth(sizes: list[int], seed: int) -> None:
    segments: tuple[int, ...] = ()
    for size in sizes:
        if sum(segments) + size <= 72:
            segments += (size,)
    case = Case(num_rows=72, num_heads=2, width=8, segments=segments)
    inputs = make_inputs(case, seed)
    check(small_blocks(*inputs), truth(case, inputs), "float32")


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_the_comparison_fails_without_the_segment_mask(implementation: str) -> None:
    case = SMALL["three_sizes"]
    inputs = make_inputs(case)
    found = attend(*inputs, implementation=implementation)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(found, truth(case, inputs, drop_mask=True), case.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_changing_one_image_leaves_the_others_bit_equal(implementation: str, dtype: str) -> None:
    case = Case(num_rows=128, num_heads=3, width=24, segments=(16, 64, 20), dtype=dtype)
    inputs = make_inputs(case)
    changed = tuple(x.at[16:80].multiply(-3) for x in inputs[:3]) + inputs[3:]
    before, after = (
        np.asarray(attend(*x, implementation=implementation), np.float32) for x in (inputs, changed)
    )
    others = np.r_[0:16, 80:128]
    np.testing.assert_array_equal(before[others], after[others])
    assert (before[16:80] != after[16:80]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_a_window_mask_is_used_and_full_bounds_see_everything(implementation: str) -> None:
    windows = Case(num_rows=64, num_heads=4, width=16, segments=(16,) * 4)
    for case, untouched in ((windows, np.r_[0:16, 32:64]), (SMALL["one_full"], np.r_[0:0])):
        inputs = make_inputs(case)
        k, v = (x.at[20].add(1.0) for x in inputs[1:3])
        before = np.asarray(attend(*inputs, implementation=implementation))
        after = np.asarray(attend(inputs[0], k, v, *inputs[3:], implementation=implementation))
        changed = (before != after).any(axis=(1, 2))
        assert not changed[untouched].any()
        assert changed[np.setdiff1d(np.arange(64), untouched)].all()


def test_packing_loses_no_precision_against_each_image_alone() -> None:
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", TOLERANCE["bfloat16"])):
        case = Case(num_rows=128, num_heads=3, width=24, segments=(48, 80), dtype=dtype)
        inputs = make_inputs(case)
        packed = np.asarray(attend(*inputs, implementation="blocked"), np.float32)
        for rows in (slice(0, 48), slice(48, 128)):
            size = rows.stop - rows.start
            own = (jnp.asarray(bounds_of((size,), size)), jnp.int32(size))
            q, k, v = (x[rows] for x in inputs[:3])
            alone = attend(q, k, v, *own, implementation="blocked")
            np.testing.assert_allclose(
                packed[rows], np.asarray(alone, np.float32), rtol=0, atol=tolerance
            )


def test_every_capacity_gives_the_same_rows() -> None:
    segments = (36, 20)
    found = []
    for num_rows in (64, 128, 256, 512):
        inputs = make_inputs(Case(num_rows=56, num_heads=2, width=8, segments=segments))
        extra = ((0, num_rows - 56), (0, 0), (0, 0))
        q, k, v = (jnp.pad(x, extra, constant_values=np.nan) for x in inputs[:3])
        bounds = jnp.asarray(bounds_of(segments, num_rows))
        found.append(attend(q, k, v, bounds, jnp.int32(56), implementation="blocked")[:56])
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=0, atol=1e-5)


def test_dense_gives_finite_gradients_with_padding() -> None:
    q, k, v, bounds, count = make_inputs(SMALL["one_padded"])
    q, k, v = (jnp.nan_to_num(x) for x in (q, k, v))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (attend(q, k, v, bounds, count, implementation="dense") ** 2).sum()

    for gradient in jax.grad(loss, argnums=(0, 1, 2))(q, k, v):
        assert jnp.isfinite(gradient).all()
        assert jnp.abs(gradient[:36]).max() > 0
        assert not gradient[36:].any()


@pytest.mark.parametrize(
    ("segments", "visits"),
    [
        ((4096,), 256),
        ((256,) * 16, 16),
        ((100,), 1),
        ((16,) * 256, 16),
        ((2048, 2048), 128),
        ((), 0),
    ],
)
def test_visited_key_blocks_grow_with_the_squares_of_the_segments(
    segments: tuple[int, ...], visits: int
) -> None:
    bounds = jnp.asarray(bounds_of(segments, 4096))
    start, end = reference.key_blocks(bounds, jnp.int32(sum(segments)), 256)
    assert int((end - start).sum()) == visits


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2000), max_size=30))
def test_visited_key_blocks_are_bounded_by_the_sum_of_squares(sizes: list[int]) -> None:
    segments = tuple(n for i, n in enumerate(sizes) if sum(sizes[: i + 1]) <= 8192)
    bounds = jnp.asarray(bounds_of(segments, 8192))
    start, end = reference.key_blocks(bounds, jnp.int32(sum(segments)), 64)
    # A block of queries on a border visits the blocks of both neighbours.
    needed = sum((math.ceil(n / 64) + 1) ** 2 for n in segments)
    assert int((end - start).sum()) <= needed + sum(segments) // 64 + 1


@pytest.mark.parametrize("num_heads", [8, 3])
@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_sharded_over_heads_equals_one_device_without_collectives(
    implementation: str, num_heads: int
) -> None:
    case = Case(num_rows=64, num_heads=num_heads, width=8, segments=(30, 20))
    inputs = make_inputs(case)
    mesh = make_mesh(4, jax.devices()[:4])
    compiled = attend.lower(*inputs, implementation=implementation, mesh=mesh).compile()
    check(attend(*inputs, implementation=implementation, mesh=mesh), truth(case, inputs), "float32")
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in (compiled.as_text() or collective)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((8, 2))}, r"q_PNH has shape \(8, 2\)"),
        ({"q": jnp.zeros((8, 2, 4), jnp.float16)}, "q_PNH has dtype float16"),
        ({"k": jnp.zeros((8, 1, 4))}, r"k_PNH has shape \(8, 1, 4\); it must be \(8, 2, 4\)"),
        ({"v": jnp.zeros((8, 2, 4), jnp.bfloat16)}, "v_PNH has dtype bfloat16"),
        ({"bounds": jnp.zeros((8, 2), jnp.int32)}, r"bounds_2P has shape \(8, 2\)"),
        ({"bounds": jnp.zeros((2, 8))}, "bounds_2P has dtype float32"),
        ({"count": jnp.zeros((1,), jnp.int32)}, r"num_patches has shape \(1,\)"),
        ({"implementation": "fast"}, "implementation is 'fast'; it must be one of"),
    ],
)
def test_a_broken_contract_is_named(change: dict[str, Any], message: str) -> None:
    x = jnp.zeros((8, 2, 4))
    given_: dict[str, Any] = {"q": x, "k": x, "v": x, "bounds": jnp.zeros((2, 8), jnp.int32)}
    given_ |= {"count": jnp.int32(8)} | change
    implementation = given_.pop("implementation", "dense")
    with pytest.raises(ValueError, match=message):
        api.vision_attention(*given_.values(), scale=1.0, implementation=implementation, mesh=None)


def test_each_platform_has_a_default() -> None:
    assert [api.pick(p) for p in ("tpu", "cpu", "gpu")] == ["pallas", "blocked", "blocked"]
    with pytest.raises(ValueError, match="platform is 'rocm'"):
        api.pick("rocm")
