"""The ends of the paged attention kernel: norm and rotation of heads, blocks of tokens, padding."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_paged_attention import CASES, SCALE, TOLERANCE, make_inputs, make_scales
from tests.kernels.test_paged_attention_pallas import BLOCKS, check
from tpu_vl.kernels.interpret import COMPILER_OPTIONS
from tpu_vl.kernels.paged_attention import api
from tpu_vl.kernels.paged_attention.cases import Case


def make_rope(case: Case) -> api.Rope:
    """Random norms and tables, NaN for padding tokens."""
    rng = np.random.default_rng(3)
    angles = rng.uniform(0, 6, size=(case.num_tokens, case.width // 2))
    angles[sum(case.q_lens) :] = np.nan
    angles = np.concatenate([angles, angles], axis=1)
    norms = rng.uniform(0.5, 1.5, size=(2, case.width))
    arrays = (*norms, np.cos(angles), np.sin(angles))
    return api.Rope(*(jnp.asarray(x, case.dtype) for x in arrays), eps=1e-2)


@pytest.mark.parametrize(
    ("name", "width"),
    [("mixed", 16), ("bfloat16", 128), ("int8", 128)],
)
def test_heads_are_normed_and_rotated_as_in_the_reference(name: str, width: int) -> None:
    case = replace(CASES[name], width=width)
    inputs, scales = make_inputs(case, implementation="pallas"), make_scales(case)
    runs = [
        functools.partial(
            api.paged_attention,
            scale=width**-0.5,
            implementation=implementation,
            mesh=None,
            kv_scales_2K=scales,
            rope=make_rope(case),
            blocks=BLOCKS,
        )
        for implementation in ("pallas", "dense")
    ]
    found, expected = (jax.jit(x, compiler_options=COMPILER_OPTIONS)(*inputs) for x in runs)
    # A float32 sum in another order may round a key to the next step of the cache.
    step = 1 if case.cache_dtype == "int8" else 2 * TOLERANCE[case.dtype]
    for a, b, limit in zip(found, expected, (2 * TOLERANCE[case.dtype], step), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (a, b))
        np.testing.assert_allclose(x, y, rtol=0, atol=limit)


# Two blocks and four: a slot is used again from the third on.
@pytest.mark.parametrize(
    ("num_tokens", "live"), [(201, 201), (201, 150), (201, 0), (400, 390), (400, 260)]
)
def test_tokens_in_several_blocks_and_padding_that_is_zero(num_tokens: int, live: int) -> None:
    lengths = (live - live // 3, live // 3) if live else ()
    past = (50, 5) if live else ()
    case = replace(CASES["mixed"], num_tokens=num_tokens, q_lens=lengths, past_lens=past)
    found = check(case, make_inputs(case, implementation="pallas"))
    np.testing.assert_array_equal(found[live:], 0)


def test_heads_wider_than_the_lanes_are_not_rotated() -> None:
    case = replace(CASES["mixed"], width=160, num_heads=2, num_kv_heads=1)
    inputs = make_inputs(case, implementation="pallas")
    with pytest.raises(ValueError, match="heads of at most 128, not 160"):
        api.paged_attention(
            *inputs, scale=SCALE, implementation="pallas", mesh=None, rope=make_rope(case)
        )


def test_tables_of_another_length_are_refused() -> None:
    case = CASES["mixed"]
    rope = make_rope(replace(case, num_tokens=case.num_tokens + 1))
    inputs = make_inputs(case)
    with pytest.raises(ValueError, match=r"rope.cos_TH has shape \(97, 16\)"):
        api.paged_attention(*inputs, scale=SCALE, implementation="dense", mesh=None, rope=rope)
