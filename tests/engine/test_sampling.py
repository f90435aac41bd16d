"""Sampling against a plain numpy reference: supports, distribution, penalties, logprobs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tpu_vl.config import EngineConfig
from tpu_vl.engine import sampling
from tpu_vl.engine.layout import (
    MAX_LOGPROBS,
    NO_TOKEN,
    PROMPT_BIT,
    SampleRows,
    sample_layout,
)
from tpu_vl.mesh import MODEL, make_mesh

V, R, SUPPRESSED = 23, 512, (5, 11)
CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=64,
    max_num_seqs=R,
    max_num_batched_tokens=R,
    max_num_queued_reqs=1,
    page_size=8,
    num_pages=8,
    token_capacities=(R,),
)
_sample = jax.jit(partial(sampling.sample, suppressed=SUPPRESSED))
_support_bound = jax.jit(sampling._support_bound)


def rows_of(**values) -> SampleRows:
    """R rows that all have these parameters, each with its own slot and seed."""
    packed, views = sample_layout(CONFIG, R).new()
    views["slot_R"][:] = np.arange(R)
    views["seed_R"][:] = np.arange(R) + 1
    for name, value in values.items():
        views[name][:] = value
    return SampleRows(**sample_layout(CONFIG, R).unpack(jnp.asarray(packed)))


def run(logits_V, *, counts=None, bias=(), **values) -> sampling.SampleOutputs:
    """Samples R rows of the same (or of [R, V] given) logits."""
    counts_BV = np.zeros((R, V), np.uint16) if counts is None else np.tile(counts, (R, 1))
    bias_id, bias_value = np.zeros((R, 3), np.int32), np.zeros((R, 3), np.float32)
    for i, (token, value) in enumerate(bias):
        bias_id[:, i], bias_value[:, i] = token, value
    logits_RV = np.broadcast_to(np.asarray(logits_V, np.float32), (R, V))
    return _sample(logits_RV, rows_of(**values), counts_BV, bias_id, bias_value)


def reference_support(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The kept ids by sorting in float64: vLLM's order, ties at a cut kept."""
    z = (logits.astype(np.float64) - logits.max()) / temperature
    p = np.where(np.exp(z) >= min_p * (1 - 1e-7), np.exp(z), 0)
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, V) - 1], p, 0)
    p /= p.sum()
    if top_p < 1:
        levels = np.unique(p)[::-1]
        bound = next(b for b in levels if p[p >= b].sum() >= top_p - 1e-6)
        p = np.where(p >= bound, p, 0)
    return p / p.sum()


LOGITS = np.random.default_rng(3).normal(0, 2, V).astype(np.float32)
ALLOWED = np.where(np.isin(np.arange(V), SUPPRESSED), -np.inf, LOGITS).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-6, 6), min_size=V, max_size=V),
    top_k=st.integers(0, V + 2),
    top_p=st.sampled_from([0.05, 0.31, 0.5, 0.83, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.004, 0.07, 0.6, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_support_is_that_of_a_sorted_reference(values, top_k, top_p, min_p, temperature):
    # Quarters of small integers: many exact ties, none of them a rounding away from a cut.
    logits = np.asarray(values, np.float32) / 4
    rows = rows_of(top_k_R=top_k, top_p_R=top_p, min_p_R=min_p)
    scaled = np.broadcast_to((logits - logits.max()) / np.float32(temperature), (R, V))
    kept = scaled >= np.asarray(_support_bound(jnp.asarray(scaled), rows))[:, None]
    expected = reference_support(logits, temperature, top_k, top_p, min_p) > 0
    assert (kept == expected).all()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 7, 1.0, 0.0), (1.5, 0, 0.8, 0.0), (2.0, 12, 0.9, 0.05)],
)
def test_drawn_tokens_follow_the_distribution(temperature, top_k, top_p, min_p):
    expected = reference_support(ALLOWED, temperature, top_k, top_p, min_p)
    params = {"temperature_R": temperature, "top_k_R": top_k, "top_p_R": top_p, "min_p_R": min_p}
    draws = np.concatenate(
        [np.asarray(run(LOGITS, step_R=step, **params).token_R) for step in range(16)]
    )
    counts = np.bincount(draws, minlength=V)
    assert counts[expected == 0].sum() == 0
    wanted = expected[expected > 0] * len(draws)
    chi2 = ((counts[expected > 0] - wanted) ** 2 / wanted).sum()
    degrees = (expected > 0).sum() - 1
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)  # about four sigma, fixed seeds


def test_a_top_1_draw_is_greedy_and_ties_give_the_lowest_id_when_greedy():
    tied = np.zeros(V, np.float32)
    tied[[9, 4, 5]] = 3.0  # 5 is suppressed
    assert set(np.asarray(run(tied).token_R)) == {4}
    assert set(np.asarray(run(tied, temperature_R=1.0, top_k_R=1).token_R)) == {4, 9}
    assert set(np.asarray(run(LOGITS, temperature_R=1.0, top_k_R=1).token_R)) == {ALLOWED.argmax()}


def test_suppressed_ids_are_never_sampled_even_with_a_bias():
    high = LOGITS.copy()
    high[list(SUPPRESSED)] = 50.0
    drawn = np.asarray(
        run(high, temperature_R=3.0, biased_R=1, bias=[(5, 100.0), (11, 100.0)]).token_R
    )
    assert not set(drawn) & set(SUPPRESSED)
    assert set(np.asarray(run(high).token_R)) == {ALLOWED.argmax()}


def test_a_row_does_not_depend_on_its_neighbours_or_place():
    rng = np.random.default_rng(0)
    logits_RV = rng.normal(0, 1, (R, V)).astype(np.float32)
    params = {
        "temperature_R": rng.choice([0.0, 0.5, 1.0], R),
        "top_k_R": rng.integers(0, 9, R),
        "top_p_R": rng.choice([0.4, 1.0], R),
        "seed_R": rng.integers(0, 2**32, R, dtype=np.uint32),
        "step_R": rng.integers(0, 99, R),
    }
    whole = np.asarray(run(logits_RV, **params).token_R)
    order = rng.permutation(R)
    moved = run(logits_RV[order], **{k: v[order] for k, v in params.items()})
    assert (np.asarray(moved.token_R) == whole[order]).all()
    lone = np.zeros((R, V), np.float32)
    lone[7] = logits_RV[3]
    alone = {k: np.where(np.arange(R) == 7, v[3], np.zeros_like(v)) for k, v in params.items()}
    assert np.asarray(run(lone, **alone).token_R)[7] == whole[3]


def test_logits_spread_over_devices_give_the_same_tokens():
    wide = np.concatenate([LOGITS, LOGITS[:1]])  # 24 columns over two devices
    logits_RV = jnp.broadcast_to(jnp.asarray(wide), (R, V + 1))
    rows = rows_of(temperature_R=np.arange(R) % 2, top_k_R=6, top_p_R=0.9, num_logprobs_R=3)
    empty = (np.zeros((R, V + 1), np.uint16), np.zeros((R, 3), np.int32), np.zeros((R, 3)))
    sharding = NamedSharding(make_mesh(2), PartitionSpec(None, MODEL))
    spread = _sample(jax.device_put(logits_RV, sharding), rows, *empty)
    whole = _sample(logits_RV, rows, *empty)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), spread, whole)


def test_seed_and_step_decide_the_draw():
    def draw(**values):
        return np.asarray(run(LOGITS * 0, temperature_R=1.0, **values).token_R)

    assert (draw(seed_R=7, step_R=2) == draw(seed_R=7, step_R=2)).all()
    assert len(set(draw(seed_R=7, step_R=2))) == 1
    assert (draw(step_R=2) != draw(step_R=3)).any()
    assert len(set(draw())) > V // 2


def test_penalties_follow_their_definitions():
    counts = np.zeros(V, np.uint16)
    counts[2], counts[3], counts[4] = PROMPT_BIT, 3, PROMPT_BIT | 2
    logits = LOGITS.copy()
    logits[[2, 3, 4]] = [2.0, -1.0, 4.0]
    rows = rows_of(counted_R=1, repetition_R=2.0, presence_R=0.5, frequency_R=0.25)
    shaped = sampling._penalised(
        jnp.broadcast_to(jnp.asarray(logits), (R, V)), rows, jnp.tile(counts, (R, 1))
    )
    expected = logits.copy()
    expected[2] = 2.0 / 2  # prompt only: repetition alone
    expected[3] = -1.0 * 2 - 0.5 - 3 * 0.25
    expected[4] = 4.0 / 2 - 0.5 - 2 * 0.25
    np.testing.assert_allclose(shaped[0], expected, rtol=1e-6)
    off = rows_of(counted_R=0, repetition_R=2.0)
    same = sampling._penalised(jnp.asarray([logits] * R), off, jnp.tile(counts, (R, 1)))
    np.testing.assert_array_equal(same[0], logits)


def test_a_penalty_changes_the_greedy_token():
    best, second = np.argsort(ALLOWED)[::-1][:2]
    counts = np.zeros(V, np.uint16)
    counts[best] = 1
    gap = float(ALLOWED[best] - ALLOWED[second])
    kept = run(LOGITS, counts=counts, counted_R=1, presence_R=gap * 0.9)
    moved = run(LOGITS, counts=counts, counted_R=1, presence_R=gap * 1.1)
    assert set(np.asarray(kept.token_R)) == {best}
    assert set(np.asarray(moved.token_R)) == {second}


def test_bias_applies_to_biased_rows_only_and_stops_wait_for_min_tokens():
    target = int(np.argsort(ALLOWED)[::-1][8])
    biased = np.arange(R) % 2
    tokens = np.asarray(run(LOGITS, bias=[(target, 60.0)], biased_R=biased).token_R)
    assert set(tokens[biased == 1]) == {target}
    assert set(tokens[biased == 0]) == {ALLOWED.argmax()}
    best, second = np.argsort(ALLOWED)[::-1][:2]
    stops = np.full((R, 16), np.iinfo(np.int32).max, np.int32)
    stops[:, 0] = best
    assert set(np.asarray(run(LOGITS, stop_ids_RS=stops).token_R)) == {second}


def test_stops_and_biases_of_every_row_apply_to_it_alone():
    rng = np.random.default_rng(5)
    num_entries = 6
    slot = rng.permutation(R)
    stops = np.where(rng.random((R, 16)) < 0.1, rng.integers(0, V, (R, 16)), NO_TOKEN)
    biased = rng.integers(0, 2, R)
    ids = rng.integers(0, V, (R, num_entries)).astype(np.int32)  # duplicates add up
    values = rng.normal(0, 3, (R, num_entries)).astype(np.float32)
    values[np.arange(num_entries) >= rng.integers(0, num_entries, (R, 1))] = 0
    logits_RV = rng.normal(0, 2, (R, V)).astype(np.float32)
    expected = logits_RV.copy()
    for i in range(R):
        expected[i, stops[i][stops[i] != NO_TOKEN]] = -np.inf
        if biased[i]:
            np.add.at(expected[i], ids[slot[i]], values[slot[i]])
    rows = rows_of(slot_R=slot, stop_ids_RS=stops, biased_R=biased)
    found = jax.jit(sampling._adjusted)(logits_RV, rows, ids, values)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_logprobs_are_of_the_raw_distribution_and_the_first_is_the_greedy_token():
    wanted = np.arange(R) % (MAX_LOGPROBS + 2) - 1
    out = run(LOGITS, num_logprobs_R=wanted, biased_R=1, bias=[(2, -3.0)])
    raw = ALLOWED - np.log(np.exp(ALLOWED.astype(np.float64)).sum())
    order = np.argsort(-ALLOWED, kind="stable")[:MAX_LOGPROBS]
    token = int(np.asarray(out.token_R)[0])
    np.testing.assert_allclose(np.asarray(out.logprob_R), raw[token], rtol=1e-5)
    assert (np.asarray(out.top_token_RA)[-1] == order).all()
    np.testing.assert_allclose(np.asarray(out.top_logprob_RA)[-1], raw[order], rtol=1e-5)
    assert np.exp(np.asarray(out.top_logprob_RA)[0]).sum() <= 1 + 1e-6
    assert int(np.asarray(out.top_token_RA)[0, 0]) == ALLOWED.argmax()


def test_alternatives_with_equal_logits_come_once_each_lowest_id_first():
    tied = np.zeros(V, np.float32)
    out = run(tied, num_logprobs_R=MAX_LOGPROBS)
    expected = [i for i in range(V) if i not in SUPPRESSED][:MAX_LOGPROBS]
    assert np.asarray(out.top_token_RA)[0].tolist() == expected


def test_logits_that_are_not_finite_give_no_token():
    bad = np.tile(LOGITS, (R, 1))
    bad[1, 3] = np.nan
    bad[2, 3] = np.inf
    bad[3, :] = -np.inf
    for temperature in (0.0, 1.0):
        tokens = np.asarray(run(bad, temperature_R=temperature).token_R)
        assert tokens[1:4].tolist() == [-1, -1, -1]
        assert (np.delete(tokens, [1, 2, 3]) >= 0).all()
