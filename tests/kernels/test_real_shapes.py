"""What one device computes of the real cases, in v6e's block sizes, in TPU interpret mode."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import measure
from tests.kernels import test_paged_attention as paged
from tests.kernels import test_vision_attention as vision
from tests.kernels.test_vision_attention_pallas import attend_by_entry
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.paged_attention.cases import Case as PagedCase
from tpu_vl.kernels.vision_attention import cases as vision_cases
from tpu_vl.kernels.vision_attention.cases import Case as VisionCase

# Minutes each at most, but for 65,536 patches in sixteen heads: twenty.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
MOST_ROWS = 1024  # of a segment are compared, spread over it
# What float32 sums and powers of two add to the roundings that `check` allows.
ATOL = {"float32": 1e-5, "bfloat16": 1e-4}


def shares(cases: Mapping[str, Any]) -> dict[str, Any]:
    """What one device has of the cases; of those that are then alike, one."""
    local = {name: measure.one_device(case) for name, case in cases.items()}
    names = {case: name for name, case in local.items()}
    return {name: case for case, name in names.items()}


def by_program(batches: dict[str, PagedCase]) -> dict[str, list[PagedCase]]:
    """The batches that one program attends, under the first one's name."""
    programs: dict[PagedCase, dict[str, PagedCase]] = {}
    for name, case in batches.items():
        programs.setdefault(replace(case, q_lens=(), past_lens=()), {})[name] = case
    return {next(iter(found)): list(found.values()) for found in programs.values()}


TOWERS = shares(vision_cases.REAL)
PROGRAMS = by_program(shares(paged_cases.REAL))


@pytest.fixture(autouse=True)
def free_programs() -> Iterator[None]:
    """Interpreted programs are large: a hundred take all memory maps of a process (65,530)."""
    yield
    jax.clear_caches()


class Truth(NamedTuple):
    """Results in float32, and what they would be were all values positive."""

    out: np.ndarray
    size: np.ndarray


def check(found: np.ndarray, truth: Truth, dtype: str) -> None:
    """A result, and each weight in it, may be off by half a unit in the last place of `dtype`."""
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    limit = half_ulp * (np.abs(truth.out) + truth.size) + ATOL[dtype]
    np.testing.assert_array_less(np.abs(found - truth.out), limit)


def attend(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ values, weights @ np.abs(values)


def tower_truth(
    case: VisionCase, inputs: tuple[jax.Array, ...]
) -> Iterator[tuple[np.ndarray, Truth]]:
    """Rows and their results, segment by segment."""
    q, k, v = (np.asarray(x, np.float32).swapaxes(0, 1) for x in inputs[:3])
    start = 0
    for size in case.segments:
        rows = start + np.unique(np.linspace(0, size - 1, min(size, MOST_ROWS), dtype=int))
        keys = slice(start, start + size)
        found = np.empty((2, len(rows), *q.shape[::2]), np.float32)
        for head in range(case.num_heads):
            logits = vision.SCALE * q[head, rows] @ k[head, keys].T
            found[:, :, head] = attend(logits, v[head, keys])
        yield rows, Truth(*found)
        start += size


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_equals_the_truth(name: str) -> None:
    case = TOWERS[name]
    inputs = vision.make_inputs(case)
    found = np.asarray(attend_by_entry(*inputs), np.float32)
    assert np.isfinite(found).all()
    for rows, truth in tower_truth(case, inputs):
        check(found[rows], truth, case.dtype)


def heads_of(case: PagedCase, rows: np.ndarray) -> np.ndarray:
    """K and V [2, X, K, H] of rows of a page; a head wider than the lanes has several of each."""
    parts = -(-case.width // rows.shape[-1])
    rows = rows[:, : 2 * case.num_kv_heads * parts]
    split = rows.reshape(len(rows), case.num_kv_heads, parts, 2, -1).transpose(3, 0, 1, 2, 4)
    return split.reshape(2, len(rows), case.num_kv_heads, -1)[..., : case.width]


def rows_of(kv: np.ndarray, num_rows: int, lanes: int) -> np.ndarray:
    """What `heads_of` undoes; zeros where heads are narrower than the lanes, or too few."""
    kv = np.pad(kv, [(0, 0)] * 3 + [(0, -kv.shape[-1] % lanes)])
    split = kv.reshape(*kv.shape[:3], -1, lanes).transpose(1, 2, 3, 0, 4)
    rows = split.reshape(kv.shape[1], -1, lanes)
    return np.pad(rows, [(0, 0), (0, num_rows - rows.shape[1]), (0, 0)])


def paged_truth(case: PagedCase, inputs: tuple[jax.Array, ...]) -> tuple[Truth, np.ndarray]:
    """Results of the live tokens, and the pages as the new ones leave them.

    In numpy alone: the kernel shares the functions of pages.py that lay rows out and quantise.
    """
    q, k, v = (np.asarray(x, np.float32) for x in inputs[:3])
    pages, table = np.array(inputs[3]), np.asarray(inputs[4])
    found = np.empty((2, sum(case.q_lens), *q.shape[1:]), np.float32)
    scales, kv = paged.make_scales(case), np.stack([k, v])
    steps = np.ones((2, 1, case.num_kv_heads, 1), np.float32)
    if scales is not None:
        steps = np.asarray(scales)[:, None, :, None]
        kv = np.stack(
            [paged.quantise(x, s, case.cache_dtype) for x, s in zip(kv, steps, strict=True)]
        )
    start, group = 0, case.num_heads // case.num_kv_heads
    for new, past, row in zip(case.q_lens, case.past_lens, table, strict=False):
        tokens, at = slice(start, start + new), past + np.arange(new)
        slots = row[at // case.page_size], at % case.page_size
        pages[slots] = rows_of(kv[:, tokens], *pages.shape[2:])
        used = pages[row[: -(-(past + new) // case.page_size)]]
        context = used.reshape(-1, *pages.shape[2:])[: past + new].astype(np.float32)
        keys, values = heads_of(case, context) * steps
        hidden = np.arange(past + new) > at[:, None]
        for head in range(case.num_heads):
            logits = paged.SCALE * q[tokens, head] @ keys[:, head // group].T
            logits = np.where(hidden, -np.inf, logits)
            found[:, tokens, head] = attend(logits, values[:, head // group])
        start += new
    return Truth(*found), pages


def num_pages(case: PagedCase) -> int:
    lens = np.add(case.q_lens, case.past_lens)
    return int((-(-lens // case.page_size)).sum())


def compare(case: PagedCase, pool: int) -> None:
    inputs = paged.make_inputs(case, implementation="pallas", num_pages=pool)
    truth, expected_pages = paged_truth(case, inputs)
    scales = paged.make_scales(case)
    found, pages = paged.attend(*inputs, implementation="pallas", scales=scales)
    check(np.asarray(found, np.float32)[: len(truth.out)], truth, case.dtype)
    unsigned = f"uint{8 * expected_pages.dtype.itemsize}"
    np.testing.assert_array_equal(np.asarray(pages).view(unsigned), expected_pages.view(unsigned))


@pytest.mark.parametrize("name", PROGRAMS)
def test_paged_attention_equals_the_truth(name: str) -> None:
    batches = PROGRAMS[name]
    pool = 3 + max(num_pages(case) for case in batches)  # one size, one compilation
    for case in batches:
        compare(case, pool)


def test_the_comparison_fails_where_a_causal_limit_is_off_by_one() -> None:
    case = replace(paged_cases.SMALL["chunk"], dtype="bfloat16", cache_dtype="bfloat16")
    inputs = paged.make_inputs(case, implementation="pallas")
    truth, _ = paged_truth(case, inputs)
    exact, off = (paged.truth(case, inputs, shift=n)[0][: len(truth.out)] for n in (0, 1))
    np.testing.assert_allclose(truth.out, exact, rtol=0, atol=1e-5)
    with pytest.raises(AssertionError, match="not strictly ordered"):
        check(off, truth, case.dtype)
