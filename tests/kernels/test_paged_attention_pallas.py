"""The paged attention kernel in TPU interpret mode against `dense`, the plain reference."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from tests.kernels.test_paged_attention import (
    CASES,
    SCALE,
    TOLERANCE,
    attend,
    make_inputs,
    make_scales,
)
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.kernels.interpret import COMPILER_OPTIONS, Target
from tpu_vl.kernels.paged_attention import api, blocks, pallas_tpu, prefill
from tpu_vl.kernels.paged_attention.cases import Case
from tpu_vl.kernels.paged_attention.pages import Batch
from tpu_vl.mesh import make_mesh

# Small: several key blocks, tiles and rounds of the rings in a context of 320 tokens.
BLOCKS = blocks.Blocks(decode_keys=128, prefill_keys=128, prefill_rows=128, num_bufs=3)


def attend_tpu(
    inputs: Sequence[jax.Array],
    *,
    mesh: Mesh | None = None,
    scales: jax.Array | None = None,
    sizes: blocks.Blocks = BLOCKS,
) -> tuple[jax.Array, jax.Array]:
    """One signature for all tests: the same shapes compile once."""
    return attend(*inputs, implementation="pallas", mesh=mesh, scales=scales, sizes=sizes)


def check(
    case: Case,
    inputs: tuple[jax.Array, ...],
    *,
    mesh: Mesh | None = None,
    limit: float = 0,
    sizes: blocks.Blocks = BLOCKS,
) -> np.ndarray:
    """The kernel's results equal the reference's, its pages every bit of them."""
    scales = make_scales(case)
    out, pages = attend_tpu(inputs, mesh=mesh, scales=scales, sizes=sizes)
    expected, expected_pages = attend(*inputs, implementation="dense", scales=scales, mesh=mesh)
    assert out.dtype == case.dtype
    found, limit = np.asarray(out, np.float64), limit or TOLERANCE[case.dtype]
    np.testing.assert_allclose(found, np.asarray(expected, np.float64), rtol=0, atol=limit)
    assert pages.dtype == case.cache_dtype
    unsigned = f"uint{8 * pages.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.asarray(pages).view(unsigned), np.asarray(expected_pages).view(unsigned)
    )
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_the_reference(name: str) -> None:
    case = CASES[name]
    check(case, make_inputs(case, implementation="pallas"))


def test_a_head_wider_than_the_lanes_equals_the_reference() -> None:
    case = replace(CASES["mixed"], width=160, num_heads=2, num_kv_heads=1)
    check(case, make_inputs(case, implementation="pallas"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_several_products_equal_the_reference(dtype: str) -> None:
    case = replace(
        CASES["mixed"],
        num_heads=8,
        max_pages=80,
        q_lens=(40, 1, 30, 20),
        past_lens=(560, 5, 300, 230),
        dtype=dtype,
        cache_dtype=dtype,
    )
    large = replace(BLOCKS, prefill_keys=2 * prefill.KEYS, prefill_rows=2 * prefill.COLUMNS)
    check(case, make_inputs(case, implementation="pallas"), sizes=large)


LENGTHS = st.tuples(
    st.sampled_from([1, 1, 1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 90]),
    st.sampled_from([0, 1, 7, 8, 9, 100, 119, 120, 127, 128, 129, 191, 230]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(LENGTHS, max_size=6), st.integers(0, 2**31))
def test_any_raggedness_equals_the_reference(sequences: list[tuple[int, int]], seed: int) -> None:
    q_lens: tuple[int, ...] = ()
    past_lens: tuple[int, ...] = ()
    for new, past in sequences:
        if sum(q_lens) + new <= 96:
            q_lens, past_lens = (*q_lens, new), (*past_lens, past)
    case = replace(CASES["mixed"], q_lens=q_lens, past_lens=past_lens)
    check(case, make_inputs(case, seed, implementation="pallas"))


def test_logits_far_above_those_of_the_first_block_are_weighed_again() -> None:
    case = replace(CASES["mixed"], q_lens=(40, 1, 40), past_lens=(200, 200, 240))
    q, k, v, pages, table, starts, lens = make_inputs(case, implementation="pallas")
    size = case.page_size
    for seq in (0, 1):  # the third sequence stays as it is and follows a repeated tile
        for at in range(130, 200):
            pages = pages.at[table[seq, at // size], at % size, 0::2].multiply(50.0)
    # float32 holds a logit of 100 to within 1e-5, and so its exponential.
    check(case, (q, k, v, pages, table, starts, lens), limit=2e-4)


def test_keys_that_a_query_does_not_see_give_it_no_shift() -> None:
    case = replace(CASES["mixed"], q_lens=(40,), past_lens=(0,))
    q, k, *others = make_inputs(case, implementation="pallas")
    check(case, (q, k.at[8:32].multiply(50.0), *others), limit=2e-4)


def test_a_sequence_that_is_not_a_number_leaves_the_others_alone() -> None:
    case = replace(CASES["mixed"], q_lens=(1, 1, 40, 30), past_lens=(150, 150, 100, 100))
    inputs = make_inputs(case, implementation="pallas")
    expected, _ = attend_tpu(inputs)
    for broken, rows in ((0, slice(0, 1)), (2, slice(2, 42))):
        q = inputs[0].at[rows].set(jnp.nan)
        found = np.array(attend_tpu((q, *inputs[1:]))[0])
        assert np.isnan(found[rows]).all(), broken
        found[rows] = expected[rows]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["bfloat16", "int8_bfloat16"])
def test_sharded_over_heads_equals_the_reference(name: str) -> None:
    case = replace(CASES[name], num_heads=8, num_kv_heads=4)
    mesh = make_mesh(4, jax.devices()[:4])
    inputs = make_inputs(case, implementation="pallas", mesh=mesh)
    placed = jax.sharding.NamedSharding(mesh, api.cache_spec(case.num_kv_heads, mesh))
    inputs = (*inputs[:3], jax.device_put(inputs[3], placed), *inputs[4:])
    check(case, inputs, mesh=mesh)


def test_no_copy_races_with_another_or_with_the_computation() -> None:
    # Three blocks of tokens: one takes the slot of another.
    case = replace(
        CASES["mixed"], num_tokens=300, q_lens=(1, 260, 1, 3), past_lens=(150, 50, 15, 140)
    )
    inputs = make_inputs(case, implementation="pallas")
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    run = functools.partial(
        pallas_tpu.ragged,
        scale=SCALE,
        kv_scales_2K=None,
        target=Target(CHIPS["v6e"], interpret),
        blocks=BLOCKS,
    )
    batch = Batch(jnp.clip(inputs[4], 0, len(inputs[3]) - 1), inputs[5], inputs[6])
    out, _ = jax.jit(run, compiler_options=COMPILER_OPTIONS)(*inputs[:4], batch)
    expected, _ = attend(*inputs, implementation="dense")
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE["float32"])
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


SIZES = blocks.Sizes(
    num_rows=64,
    cache_bytes=2,
    query_rows=128,
    group=4,
    query_bytes=2,
    num_kv_heads=32,
    width=128,
)


def test_blocks_shrink_until_they_fit_the_chip() -> None:
    chip = CHIPS["v5p"]
    large = blocks.Blocks(decode_keys=2048, prefill_keys=2048, prefill_rows=512, num_bufs=4)
    assert blocks.vmem_bytes(large, SIZES, 16) > blocks.vmem_limit_bytes(chip)
    found = blocks.fit(large, SIZES, 16, 4096, chip)
    assert blocks.vmem_bytes(found, SIZES, 16) <= blocks.vmem_limit_bytes(chip)
    assert found.prefill_keys < large.prefill_keys
    few = blocks.fit(large, SIZES, 16, 3, CHIPS["v6e"])
    assert few.prefill_rows == blocks.LEAST_ROWS, "a tile is no larger than the tokens"


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    wide = replace(SIZES, num_rows=4096, num_kv_heads=2048, query_rows=8192)
    with pytest.raises(ValueError, match=r"needs \d+ bytes of VMEM .* v5p gives it 50331648"):
        blocks.fit(BLOCKS, wide, 256, 4096, CHIPS["v5p"])


def test_tiles_beyond_128_tokens_are_for_steps_of_many() -> None:
    chip, wanted = CHIPS["v6e"], blocks.formula(32, 8, 128, "bfloat16", CHIPS["v6e"])
    assert wanted.prefill_rows == 1024
    assert blocks.formula(32, 8, 128, "bfloat16", CHIPS["v5e"]).prefill_rows == 512
    tokens_of = {1024: 256, 1023: 128, 512: 128, 64: 64}
    few_heads = replace(SIZES, num_kv_heads=8, query_rows=32, num_rows=16)
    for num_tokens, tile in tokens_of.items():
        found = blocks.fit(wanted, few_heads, 16, num_tokens, chip)
        assert found.prefill_rows // SIZES.group == tile, num_tokens
    grouped = replace(few_heads, group=16)
    wide = blocks.formula(64, 4, 128, "bfloat16", chip)
    assert blocks.fit(wide, grouped, 16, 128, chip).prefill_rows // 16 == 128


def test_a_page_table_beyond_scalar_memory_is_refused_before_tracing() -> None:
    case = replace(CASES["mixed"], num_seqs=64, max_pages=4032)
    inputs = make_inputs(replace(case, max_pages=64), implementation="pallas")
    q, k, v, pages, _, starts, lens = inputs
    words = r"64 sequences of 4032 pages of 8 tokens take 1032192 bytes.*--block-size"
    table = jnp.zeros((case.num_seqs, case.max_pages), jnp.int32)
    with pytest.raises(ValueError, match=words):
        attend_tpu((q, k, v, pages, table, starts, lens))
    blocks.check_scalar_memory(64, 4000, 8, 96, 64)


def test_the_table_goes_before_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (8, 2, 128, 64, "bfloat16")
    by_formula = blocks.formula(8, 2, 128, "bfloat16", CHIPS["v6e"])
    assert blocks.pick_blocks(*shape, CHIPS["v6e"]) == by_formula
    monkeypatch.setitem(blocks.TABLE, ("v6e", *shape), (128, 256, 512, 3))
    found = blocks.pick_blocks(*shape, CHIPS["v6e"])
    assert (found.decode_keys, found.prefill_keys, found.num_bufs) == (128, 256, 3)
