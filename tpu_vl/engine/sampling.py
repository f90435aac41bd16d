"""From logits to one token per row, by threshold search instead of a sort of the vocabulary.

The order follows vLLM: ids that are never answered and stops that come too early are removed,
logit_bias is added, penalties apply, then temperature, min-p, top-k and top-p cut the support and
a token is drawn. Ties at a cut are all kept. Logprobs are of the model's own distribution over
the ids that can be answered, before bias, penalties, temperature and cuts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from tpu_vl.engine.layout import MAX_LOGPROBS, NO_TOKEN, PROMPT_BIT, SampleRows
from tpu_vl.tree import pytree

_SEARCH_BITS = 2
"""Bits of the threshold settled per pass over the logits."""

_LOWEST = 0x007F_FFFF
"""The place of -inf in the order of all floats."""


@pytree
class SampleOutputs:
    """The tokens of a step, one row per sampled sequence.

    Args:
        token_R: int32 the tokens; -1 where the row's largest logit is not finite.
        logprob_R: float32 log-probability of the token; 0 where nobody asked.
        top_token_RA: int32 [R, MAX_LOGPROBS] likeliest tokens, likeliest first.
        top_logprob_RA: float32 their log-probabilities.
    """

    token_R: jax.Array
    logprob_R: jax.Array
    top_token_RA: jax.Array
    top_logprob_RA: jax.Array


def sample(
    logits_RV: jax.Array,
    rows: SampleRows,
    counts_BV: jax.Array,
    bias_id_BZ: jax.Array,
    bias_value_BZ: jax.Array,
    *,
    suppressed: tuple[int, ...],
) -> SampleOutputs:
    """Chooses the next token of every row.

    A row's token depends on its own logits, parameters, seed and step only: neither on the other
    rows nor on padding.

    Args:
        logits_RV: float32.
        rows: parameters of each row.
        counts_BV: uint16 counts of each slot, read where a row is counted.
        bias_id_BZ: int32 logit_bias ids of each slot, read where a row is biased.
        bias_value_BZ: float32 their values.
        suppressed: ids in [0, V) that are never answered.

    Returns:
        The tokens, with logprobs where a row asks for them. Greedy ties give the lowest id.
    """
    for token in suppressed:
        logits_RV = jnp.where(_ids(logits_RV) == token, -jnp.inf, logits_RV)
    shaped_RV = _adjusted(logits_RV, rows, bias_id_BZ, bias_value_BZ)
    shaped_RV = _penalised(shaped_RV, rows, counts_BV)
    top_R, greedy_R = _best(shaped_RV)
    token_R = jax.lax.cond(
        jnp.any(rows.temperature_R > 0),
        lambda: jnp.where(rows.temperature_R > 0, _drawn(shaped_RV, top_R, rows), greedy_R),
        lambda: greedy_R,
    )
    logprob_R, top_token_RA, top_logprob_RA = _logprobs(logits_RV, token_R, rows)
    return SampleOutputs(
        token_R=jnp.where(jnp.isfinite(top_R), token_R, -1),
        logprob_R=logprob_R,
        top_token_RA=top_token_RA,
        top_logprob_RA=top_logprob_RA,
    )


def _ids(logits_RV: jax.Array) -> jax.Array:
    """[1, V] the token ids: compared with, where a scatter would lay the logits out anew."""
    return jnp.arange(logits_RV.shape[1], dtype=jnp.int32)[None]


def _best(logits_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's largest value and the lowest id that has it, in one pass; a NaN is the largest."""

    def better(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (value, index), (other, other_index) = x, y
        larger = (value > other) | jnp.isnan(value)
        first = larger | ((value == other) & (index < other_index))
        return jnp.where(larger, value, other), jnp.where(first, index, other_index)

    ids_RV = jnp.broadcast_to(_ids(logits_RV), logits_RV.shape)
    start = (jnp.float32(-jnp.inf), jnp.int32(NO_TOKEN))
    value_R, index_R = jax.lax.reduce((logits_RV, ids_RV), start, better, (1,))
    return value_R, index_R


def _adjusted(
    logits_RV: jax.Array, rows: SampleRows, bias_id_BZ: jax.Array, bias_value_BZ: jax.Array
) -> jax.Array:
    """Without the stops that come too early, and with logit_bias: a pass for every entry of the
    row that has most."""
    chosen_RB = _chosen_slots(rows, rows.biased_R, bias_id_BZ.shape[0])
    biased_B1 = jnp.any(chosen_RB, axis=0)[:, None]
    num_stops = _num_used(rows.stop_ids_RS != NO_TOKEN)
    num_biases = _num_used(biased_B1 & (bias_value_BZ != 0))

    def of_rows(values_BZ: jax.Array, column: jax.Array) -> jax.Array:
        values_B = jax.lax.dynamic_index_in_dim(values_BZ, column, axis=1, keepdims=False)
        return jnp.sum(jnp.where(chosen_RB, values_B, 0), axis=1, dtype=values_B.dtype)

    def add(i: jax.Array, logits_RV: jax.Array) -> jax.Array:
        stop_R = jax.lax.dynamic_index_in_dim(rows.stop_ids_RS, i, axis=1, keepdims=False)
        column = jnp.maximum(i - num_stops, 0)
        is_stop = i < num_stops
        id_R = jnp.where(is_stop, stop_R, of_rows(bias_id_BZ, column))
        value_R = jnp.where(is_stop, -jnp.inf, of_rows(bias_value_BZ, column))
        is_entry_RV = _ids(logits_RV) == id_R[:, None]
        return jnp.where(is_entry_RV, logits_RV + value_R[:, None], logits_RV)

    return jax.lax.fori_loop(0, num_stops + num_biases, add, logits_RV)


def _num_used(used_XZ: jax.Array) -> jax.Array:
    """Columns up to the last one that any row uses."""
    end_Z = jnp.arange(1, used_XZ.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(used_XZ, end_Z, 0))


def _chosen_slots(rows: SampleRows, wanted_R: jax.Array, num_slots: int) -> jax.Array:
    """[R, B] where the row's slot is, in the rows that want it: products and sums with it are
    exact, and gathers of rows from wide arrays copy them first."""
    slots_B = jnp.arange(num_slots, dtype=jnp.int32)
    return (rows.slot_R[:, None] == slots_B) & (wanted_R[:, None] > 0)


def _penalised(logits_RV: jax.Array, rows: SampleRows, counts_BV: jax.Array) -> jax.Array:
    def apply() -> jax.Array:
        chosen_RB = _chosen_slots(rows, rows.counted_R, counts_BV.shape[0])
        counts_RV = jnp.einsum(
            "rb,bv->rv",
            chosen_RB.astype(jnp.float32),
            counts_BV.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        ).astype(jnp.int32)
        times_RV = counts_RV & (PROMPT_BIT - 1)
        repetition_R1 = rows.repetition_R[:, None]
        repeated_RV = jnp.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
        out_RV = jnp.where(counts_RV > 0, repeated_RV, logits_RV)
        out_RV -= rows.frequency_R[:, None] * times_RV
        return out_RV - jnp.where(times_RV > 0, rows.presence_R[:, None], 0.0)

    return jax.lax.cond(jnp.any(rows.counted_R > 0), apply, lambda: logits_RV)


def _drawn(logits_RV: jax.Array, top_R: jax.Array, rows: SampleRows) -> jax.Array:
    temperature_R = jnp.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
    scaled_RV = (logits_RV - top_R[:, None]) / temperature_R[:, None]
    cut = (rows.top_k_R > 0) | (rows.top_p_R < 1) | (rows.min_p_R > 0)
    bound_R = jax.lax.cond(
        jnp.any(cut & (rows.temperature_R > 0)),
        lambda: _support_bound(scaled_RV, rows),
        lambda: jnp.full_like(top_R, -jnp.inf),
    )
    noise_RV = jax.vmap(partial(_gumbel, size=logits_RV.shape[1]))(rows.seed_R, rows.step_R)
    drawn_RV = jnp.where(scaled_RV >= bound_R[:, None], scaled_RV + noise_RV, -jnp.inf)
    return _best(drawn_RV)[1]


def _gumbel(seed: jax.Array, step: jax.Array, *, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), step)
    bits_V = jax.random.bits(key, (size,), jnp.uint32)
    # 32 bits with full relative precision near 0, where the winners of a large vocabulary are
    # decided; below 1, so that no token's noise is -inf.
    uniform_V = jnp.minimum((bits_V.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform_V))


def _support_bound(scaled_RV: jax.Array, rows: SampleRows) -> jax.Array:
    """Of each row the least value that may be drawn; the row's maximum is 0."""
    num_rows, vocab = scaled_RV.shape
    k_R = jnp.where(rows.top_k_R > 0, jnp.minimum(rows.top_k_R, vocab), vocab)
    least_R = jnp.log(rows.min_p_R)

    def k_reach(bound_R: jax.Array) -> jax.Array:
        bound_R = jnp.maximum(bound_R, least_R)
        return jnp.sum(scaled_RV >= bound_R[:, None], axis=-1, dtype=jnp.int32) >= k_R

    def mass_above(bound_R: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(scaled_RV >= bound_R[:, None], jnp.exp(scaled_RV), 0.0), axis=-1)

    kept_R = jnp.maximum(_largest_bound(k_reach, num_rows), least_R)
    wanted_R = rows.top_p_R * mass_above(kept_R)

    def mass_reaches(bound_R: jax.Array) -> jax.Array:
        return mass_above(jnp.maximum(bound_R, kept_R)) >= wanted_R

    bound_R = _largest_bound(mass_reaches, num_rows)
    return jnp.where(rows.top_p_R < 1, jnp.maximum(bound_R, kept_R), kept_R)


def _largest_bound(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """Per row the largest float32 that `holds`; it holds at -inf and fails for good above it."""

    def settle(i: jax.Array, place_R: jax.Array) -> jax.Array:
        shift = jnp.uint32(32 - _SEARCH_BITS) - jnp.uint32(_SEARCH_BITS) * i.astype(jnp.uint32)
        digits = range(1, 1 << _SEARCH_BITS)
        passed = [holds(_float_at(place_R | (jnp.uint32(d) << shift))) for d in digits]
        digit_R = sum(p.astype(jnp.uint32) for p in passed)
        return place_R | (digit_R << shift)

    start_R = jnp.zeros((num_rows,), jnp.uint32)
    return _float_at(jax.lax.fori_loop(0, 32 // _SEARCH_BITS, settle, start_R))


def _float_at(place: jax.Array) -> jax.Array:
    """The float32 at a place in the order of all floats; -inf for the NaNs below it."""
    bits = jnp.where(place >> 31 == 1, place ^ jnp.uint32(1 << 31), ~place)
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(place < _LOWEST, -jnp.inf, value)


def _logprobs(
    logits_RV: jax.Array, token_R: jax.Array, rows: SampleRows
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_rows = logits_RV.shape[0]
    no_tops = (
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
    )

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        total_R = jax.nn.logsumexp(logits_RV, axis=-1)

        def next_best(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            value_R, id_R, top_token_RA, top_logprob_RA = carry
            later = (logits_RV < value_R[:, None]) | (
                (logits_RV == value_R[:, None]) & (_ids(logits_RV) > id_R[:, None])
            )
            value_R, id_R = _best(jnp.where(later, logits_RV, -jnp.inf))
            return (
                value_R,
                id_R,
                top_token_RA.at[:, i].set(id_R),
                top_logprob_RA.at[:, i].set(value_R - total_R),
            )

        start = (jnp.full((num_rows,), jnp.inf), jnp.full((num_rows,), -1, jnp.int32), *no_tops)
        wanted = jnp.max(rows.num_logprobs_R)
        _, _, top_token_RA, top_logprob_RA = jax.lax.fori_loop(0, wanted, next_best, start)
        is_token_RV = _ids(logits_RV) == token_R[:, None]
        chosen_R = jnp.max(jnp.where(is_token_RV, logits_RV, -jnp.inf), axis=-1)
        return chosen_R - total_R, top_token_RA, top_logprob_RA

    def skip() -> tuple[jax.Array, jax.Array, jax.Array]:
        return (jnp.zeros((num_rows,), jnp.float32), *no_tops)

    return jax.lax.cond(jnp.any(rows.num_logprobs_R >= 0), compute, skip)
