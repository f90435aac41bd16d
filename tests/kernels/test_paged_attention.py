"""Paged attention: every implementation against a numpy truth, NaN in all that must not count."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from tpu_vl.kernels.interpret import COMPILER_OPTIONS
from tpu_vl.kernels.paged_attention import api, reference, tiles
from tpu_vl.kernels.paged_attention.cases import QUANTISED, SMALL, Case
from tpu_vl.kernels.paged_attention.pages import Batch
from tpu_vl.mesh import make_mesh

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
SCALE = 0.3


CASES = SMALL | QUANTISED


def make_scales(case: Case) -> jax.Array | None:
    """Steps of a quantised cache, different for every head, K and V."""
    if case.cache_dtype in ("float32", "bfloat16"):
        return None
    largest = 127 if case.cache_dtype == "int8" else 448
    factors = np.random.default_rng(7).uniform(2, 4, size=(2, case.num_kv_heads))
    return jnp.asarray(factors / largest, jnp.float32)


def quantise(values: np.ndarray, step: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the cache holds them, in float64: over the step, rounded, clipped."""
    scaled = values.astype(np.float32) / step.astype(np.float32)
    if dtype == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.float64)
    clipped = jnp.clip(jnp.asarray(scaled), -448, 448).astype(dtype)
    return np.asarray(clipped.astype(jnp.float32), np.float64)


def make_inputs(
    case: Case,
    seed: int = 0,
    implementation: str = "blocked",
    mesh: Mesh | None = None,
    num_pages: int | None = None,
) -> tuple[jax.Array, ...]:
    """Inputs in which padding tokens, unwritten slots and unused pages are NaN, or -128 in int8."""
    rng = np.random.default_rng(seed)
    size, kv_lens = case.page_size, np.add(case.q_lens, case.past_lens).astype(np.int64)
    counts = [-(-int(n) // size) for n in kv_lens]
    # Of the capacities only: one compilation.
    num_pages = num_pages or case.num_seqs * case.max_pages + 3
    shape = api.cache_shape(
        num_pages,
        size,
        case.num_kv_heads,
        case.width,
        implementation,
        dtype=case.cache_dtype,
        mesh=mesh,
    )
    pages = np.full(shape, -128 if case.cache_dtype == "int8" else np.nan, np.float32)
    table = rng.choice([-1, 10**9, -(10**9), 0], size=(case.num_seqs, case.max_pages))
    free = rng.permutation(num_pages)
    spread = 1 if make_scales(case) is None else 30
    for i, (count, past) in enumerate(zip(counts, case.past_lens, strict=True)):
        table[i, :count], free = free[:count], free[count:]
        at = np.arange(past)
        rows = rng.standard_normal((past, *shape[2:]), np.float32) * spread
        pages[table[i, at // size], at % size] = np.clip(rows, -127, 127)
    tokens = rng.normal(size=(case.num_tokens, case.num_heads + 2 * case.num_kv_heads, case.width))
    tokens[sum(case.q_lens) :] = np.nan
    q, k, v = np.split(tokens, [case.num_heads, case.num_heads + case.num_kv_heads], axis=1)
    starts = np.full(case.num_seqs + 1, sum(case.q_lens), np.int32)
    starts[: len(case.q_lens)] = np.cumsum((0, *case.q_lens))[:-1]
    lens = np.zeros(case.num_seqs, np.int32)
    lens[: len(kv_lens)] = kv_lens
    return (
        *(jnp.asarray(x, case.dtype) for x in (q, k, v)),
        jnp.asarray(pages).astype(case.cache_dtype),
        *(jnp.asarray(x, jnp.int32) for x in (table, starts, lens)),
    )


def truth(
    case: Case, inputs: tuple[jax.Array, ...], *, shift: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Output in float64 and the pages; `shift` moves the causal limit to plant a fault."""
    q, k, v, pages, table = (np.asarray(x, np.float64) for x in inputs[:5])
    pages, table, out = pages.copy(), table.astype(int), np.zeros_like(q)
    start, group = 0, case.num_heads // case.num_kv_heads
    scales, steps = make_scales(case), np.ones((2, case.num_kv_heads, 1))
    if scales is not None:
        steps = np.asarray(scales, np.float64)[..., None]
        k, v = (quantise(x, s, case.cache_dtype) for x, s in zip((k, v), steps, strict=True))
    for i, (new, past) in enumerate(zip(case.q_lens, case.past_lens, strict=True)):
        where = [(table[i, at // case.page_size], at % case.page_size) for at in range(past + new)]
        for n in range(new):
            row = np.zeros(pages.shape[2:])
            row[0::2, : case.width], row[1::2, : case.width] = k[start + n], v[start + n]
            pages[where[past + n]] = row
        context = np.stack([pages[w] for w in where])[..., : case.width] if where else None
        for n in range(new):
            assert context is not None
            seen = context[: max(1, past + n + 1 + shift)]
            keys, values = (np.repeat(seen[:, j::2] * steps[j], group, axis=1) for j in (0, 1))
            logits = SCALE * np.einsum("nh,xnh->nx", q[start + n], keys)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[start + n] = np.einsum("nx,xnh->nh", weights, values)
        start += new
    return out, pages


def check(found: jax.Array, expected: np.ndarray, dtype: str) -> None:
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=TOLERANCE[dtype]
    )


@functools.partial(
    jax.jit,
    static_argnames=("implementation", "mesh", "sizes"),
    compiler_options=COMPILER_OPTIONS,
)
def attend(*inputs, implementation, mesh=None, scales=None, sizes=None):
    return api.paged_attention(
        *inputs,
        scale=SCALE,
        implementation=implementation,
        mesh=mesh,
        kv_scales_2K=scales,
        blocks=sizes,
    )


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_the_truth(name: str, implementation: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    out, pages = attend(*inputs, implementation=implementation, scales=make_scales(case))
    expected_out, expected_pages = truth(case, inputs)
    check(out, expected_out, case.dtype)
    assert pages.dtype == case.cache_dtype
    np.testing.assert_array_equal(np.asarray(pages, np.float64), expected_pages)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 2, 7, 8, 9, 63, 64, 65]),
            st.sampled_from([0, 1, 7, 8, 9, 100, 191, 192, 193, 250]),
        ),
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_any_raggedness_equals_the_truth(sequences: list[tuple[int, int]], seed: int) -> None:
    q_lens: tuple[int, ...] = ()
    past_lens: tuple[int, ...] = ()
    for new, past in sequences:
        if sum(q_lens) + new <= 96:
            q_lens, past_lens = (*q_lens, new), (*past_lens, past)
    case = replace(SMALL["mixed"], q_lens=q_lens, past_lens=past_lens)
    inputs = make_inputs(case, seed)
    out, pages = attend(*inputs, implementation="blocked")
    expected_out, expected_pages = truth(case, inputs)
    check(out, expected_out, "float32")
    np.testing.assert_array_equal(np.asarray(pages, np.float64), expected_pages)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_the_comparison_fails_when_the_causal_limit_is_off_by_one(
    implementation: str, shift: int
) -> None:
    case = SMALL["chunk"]
    inputs = make_inputs(case)
    out, _ = attend(*inputs, implementation=implementation)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(out, truth(case, inputs, shift=shift)[0], case.dtype)


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    whole = replace(SMALL["prefill"], q_lens=(90,), past_lens=(0,))
    inputs = make_inputs(whole)
    expected, expected_pages = attend(*inputs, implementation="blocked")
    pages, start = inputs[3], 0
    for size in (7, 32, 33, 18):
        chunk = (jnp.roll(x, -start, axis=0) for x in inputs[:3])
        starts = jnp.full(whole.num_seqs + 1, size, jnp.int32).at[0].set(0)
        lens = jnp.zeros(whole.num_seqs, jnp.int32).at[0].set(start + size)
        out, pages = attend(*chunk, pages, inputs[4], starts, lens, implementation="blocked")
        np.testing.assert_allclose(
            out[:size], expected[start : start + size], rtol=0, atol=TOLERANCE["float32"]
        )
        start += size
    np.testing.assert_array_equal(pages, expected_pages)


def batch_of(num_seqs: int, q_lens: tuple[int, ...], past_lens: tuple[int, ...]) -> Batch:
    """A batch with room for 32,768 tokens per sequence."""
    case = replace(
        SMALL["mixed"], num_seqs=num_seqs, max_pages=2048, q_lens=q_lens, past_lens=past_lens
    )
    starts = np.concatenate([[0], np.cumsum(q_lens)])
    starts = np.pad(starts, (0, num_seqs + 1 - len(starts)), mode="edge")
    lens = np.pad(np.add(q_lens, past_lens), (0, num_seqs - len(q_lens)))
    table = jnp.zeros((num_seqs, case.max_pages), jnp.int32)
    return Batch(table, jnp.asarray(starts, jnp.int32), jnp.asarray(lens, jnp.int32))


@pytest.mark.parametrize(
    ("q_lens", "past_lens", "tile", "group", "visits"),
    [
        ((1,) * 16, (99,) * 16, 1, 16, [1]),
        ((1,) * 20, (99,) * 16 + (1000,) * 4, 1, 16, [1, 4]),
        ((512,), (0,), 64, 1, [1] * 4 + [2] * 4),
        ((128,), (1000,), 64, 1, [5, 5]),
        ((30, 70), (0, 0), 64, 1, [1, 1, 1]),
        ((), (), 64, 1, []),
    ],
)
def test_visited_key_blocks_follow_the_causal_limits_not_the_context_limit(
    q_lens: tuple[int, ...], past_lens: tuple[int, ...], tile: int, group: int, visits: list[int]
) -> None:
    batch = batch_of(32, q_lens, past_lens)
    found = tiles.make_tiles(batch, batch.q_lens_B, tile, 64)
    live = -(-int(found.num_live) // group)
    counts = reference.kv_blocks(found, group, 256)
    assert counts[:live].tolist() == visits
    assert not counts[live:].any()


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_sharded_over_heads_equals_one_device_without_collectives(
    implementation: str, num_kv_heads: int
) -> None:
    case = replace(SMALL["mixed"], num_tokens=48, num_heads=8, num_kv_heads=num_kv_heads)
    inputs = make_inputs(case)
    mesh = make_mesh(4, jax.devices()[:4])
    placed = jax.sharding.NamedSharding(mesh, api.cache_spec(num_kv_heads, mesh))
    assert placed.is_fully_replicated == (num_kv_heads == 2)
    inputs = (*inputs[:3], jax.device_put(inputs[3], placed), *inputs[4:])
    compiled = attend.lower(*inputs, implementation=implementation, mesh=mesh).compile()
    out, pages = compiled(*inputs)
    expected_out, expected_pages = truth(case, inputs)
    check(out, expected_out, "float32")
    np.testing.assert_array_equal(np.asarray(pages, np.float64), expected_pages)
    assert pages.sharding.is_equivalent_to(placed, 4)
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in (compiled.as_text() or collective)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_donated_pages_are_updated_in_place(dtype: str) -> None:
    case = replace(
        SMALL["mixed"], dtype=dtype, cache_dtype=str(api.cache_dtype(dtype, platform="cpu"))
    )
    inputs = make_inputs(case)
    shape = api.cache_shape(8192, case.page_size, case.num_kv_heads, case.width)
    pages = jax.ShapeDtypeStruct(shape, case.cache_dtype)
    run = functools.partial(api.paged_attention, scale=SCALE, implementation="blocked", mesh=None)
    step = jax.jit(run, donate_argnums=3)
    memory = step.lower(*inputs[:3], pages, *inputs[4:]).compile().memory_analysis()
    assert memory is not None
    page_bytes = np.prod(shape) * pages.dtype.itemsize
    assert memory.alias_size_in_bytes >= page_bytes
    assert memory.temp_size_in_bytes < page_bytes / 8


def test_shapes_and_dtypes_of_caches() -> None:
    assert api.cache_shape(10, 16, 8, 64) == (10, 16, 16, 64)
    assert api.cache_shape(10, 16, 8, 64, "pallas") == (10, 16, 16, 128)
    assert api.cache_shape(10, 16, 8, 192, "pallas") == (10, 16, 32, 128)
    assert api.cache_shape(10, 16, 3, 128, "pallas") == (10, 16, 8, 128)
    assert api.cache_shape(10, 16, 6, 128, "pallas") == (10, 16, 16, 128)
    assert api.cache_shape(10, 16, 1, 128, "pallas") == (10, 16, 2, 128)
    assert api.cache_shape(10, 16, 1, 128, "pallas", dtype="int8") == (10, 16, 4, 128)
    mesh = make_mesh(4, jax.devices()[:4])
    assert api.cache_shape(10, 16, 4, 128, "pallas", dtype="int8", mesh=mesh) == (10, 16, 16, 128)
    assert api.cache_shape(10, 16, 2, 128, "pallas", dtype="int8", mesh=mesh) == (10, 16, 4, 128)
    assert api.cache_dtype("bfloat16", "tpu") == jnp.bfloat16
    assert api.cache_dtype("bfloat16", "cpu") == jnp.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((8, 4, 16), jnp.float16)}, "q_TNH has dtype float16"),
        ({"q": jnp.zeros((8, 3, 16))}, "N=3 query heads are no multiple of K=2"),
        ({"k": jnp.zeros((8, 2, 8))}, r"k_TKH has shape \(8, 2, 8\); it must be \(8, 2, 16\)"),
        ({"v": jnp.zeros((8, 2, 16), jnp.bfloat16)}, "v_TKH has dtype bfloat16"),
        ({"pages": jnp.zeros((5, 8, 2, 16))}, r"its third dim must hold 4 rows on each"),
        ({"pages": jnp.zeros((5, 8, 4, 16), jnp.int8)}, "without kv_scales_2K pages must have"),
        ({"kv_scales_2K": jnp.ones((2, 2))}, "pages_LSCH has dtype float32; with kv_scales_2K"),
        ({"pages": jnp.zeros((5, 8, 4, 16), jnp.bfloat16)}, "use cache_dtype"),
        ({"table": jnp.zeros((3, 4))}, "page_table_BM has dtype float32"),
        ({"starts": jnp.zeros(3, jnp.int32)}, r"q_starts_B has shape \(3,\); it must be \(4,\)"),
        ({"lens": jnp.zeros(4, jnp.int32)}, r"kv_lens_B has shape \(4,\); it must be \(3,\)"),
        ({"implementation": "fast"}, "implementation is 'fast'; it must be one of"),
        ({"implementation": "pallas"}, "pages_LSCH is 16 wide; 'pallas' needs 128"),
    ],
)
def test_a_broken_contract_is_named(change: dict[str, Any], message: str) -> None:
    kv = jnp.zeros((8, 2, 16))
    given_: dict[str, Any] = {
        "q": jnp.zeros((8, 4, 16)),
        "k": kv,
        "v": kv,
        "pages": jnp.zeros((5, 8, 4, 16)),
    }
    given_ |= {"table": jnp.zeros((3, 4), jnp.int32), "starts": jnp.zeros(4, jnp.int32)}
    given_ |= {"lens": jnp.zeros(3, jnp.int32)} | change
    options = {"implementation": given_.pop("implementation", "dense")}
    if "kv_scales_2K" in given_:
        options["kv_scales_2K"] = given_.pop("kv_scales_2K")
    with pytest.raises(ValueError, match=message):
        api.paged_attention(*given_.values(), scale=1.0, mesh=None, **options)
