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


@pytree
class SampleOutputs:
    """The tokens of a step, one row per sampled sequence.

    Args:
        token_R: int32 the tokens; -1 where the row's logits are not finite.
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
    top_R = jnp.max(logits_RV, axis=-1)
    finite_R = jnp.isfinite(top_R) & ~jnp.any(jnp.isnan(logits_RV), axis=-1)
    shaped_RV = _without_early_stops(logits_RV, rows)
    shaped_RV = _biased(shaped_RV, rows, bias_id_BZ, bias_value_BZ)
    shaped_RV = _penalised(shaped_RV, rows, counts_BV)
    greedy_R = jnp.argmax(shaped_RV, axis=-1).astype(jnp.int32)
    token_R = jax.lax.cond(
        jnp.any(rows.temperature_R > 0),
        lambda: jnp.where(rows.temperature_R > 0, _drawn(shaped_RV, rows), greedy_R),
        lambda: greedy_R,
    )
    logprob_R, top_token_RA, top_logprob_RA = _logprobs(logits_RV, token_R, rows)
    return SampleOutputs(
        token_R=jnp.where(finite_R, token_R, -1),
        logprob_R=logprob_R,
        top_token_RA=top_token_RA,
        top_logprob_RA=top_logprob_RA,
    )


def _row_index(array_RX: jax.Array) -> jax.Array:
    return jnp.arange(array_RX.shape[0], dtype=jnp.int32)[:, None]


def _ids(logits_RV: jax.Array) -> jax.Array:
    """[1, V] the token ids: compared with, where a scatter would lay the logits out anew."""
    return jnp.arange(logits_RV.shape[1], dtype=jnp.int32)[None]


def _without_early_stops(logits_RV: jax.Array, rows: SampleRows) -> jax.Array:
    def remove(i: jax.Array, logits_RV: jax.Array) -> jax.Array:
        stop_R1 = jax.lax.dynamic_slice_in_dim(rows.stop_ids_RS, i, 1, axis=1)
        return jnp.where(_ids(logits_RV) == stop_R1, -jnp.inf, logits_RV)

    num_stops = jnp.max(jnp.sum(rows.stop_ids_RS != NO_TOKEN, axis=1, dtype=jnp.int32))
    return jax.lax.fori_loop(0, num_stops, remove, logits_RV)


def _biased(
    logits_RV: jax.Array, rows: SampleRows, bias_id_BZ: jax.Array, bias_value_BZ: jax.Array
) -> jax.Array:
    def add() -> jax.Array:
        id_RZ = jnp.take(bias_id_BZ, rows.slot_R, axis=0, mode="clip")
        value_RZ = jnp.take(bias_value_BZ, rows.slot_R, axis=0, mode="clip")
        value_RZ = jnp.where(rows.biased_R[:, None] > 0, value_RZ, 0.0)
        return logits_RV.at[_row_index(id_RZ), id_RZ].add(value_RZ, mode="drop")

    return jax.lax.cond(jnp.any(rows.biased_R > 0), add, lambda: logits_RV)


def _penalised(logits_RV: jax.Array, rows: SampleRows, counts_BV: jax.Array) -> jax.Array:
    def apply() -> jax.Array:
        counts_RV = jnp.take(counts_BV, rows.slot_R, axis=0, mode="clip").astype(jnp.int32)
        counts_RV = jnp.where(rows.counted_R[:, None] > 0, counts_RV, 0)
        times_RV = counts_RV & (PROMPT_BIT - 1)
        repetition_R1 = rows.repetition_R[:, None]
        repeated_RV = jnp.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
        out_RV = jnp.where(counts_RV > 0, repeated_RV, logits_RV)
        out_RV -= rows.frequency_R[:, None] * times_RV
        return out_RV - jnp.where(times_RV > 0, rows.presence_R[:, None], 0.0)

    return jax.lax.cond(jnp.any(rows.counted_R > 0), apply, lambda: logits_RV)


def _drawn(logits_RV: jax.Array, rows: SampleRows) -> jax.Array:
    temperature_R = jnp.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
    scaled_RV = (logits_RV - jnp.max(logits_RV, axis=-1, keepdims=True)) / temperature_R[:, None]
    # Tiny quotients round to -0.0, which the integer image below would order under 0.0.
    scaled_RV = jnp.where(scaled_RV == 0, 0.0, scaled_RV)
    cut = (rows.top_k_R > 0) | (rows.top_p_R < 1) | (rows.min_p_R > 0)
    scaled_RV = jax.lax.cond(
        jnp.any(cut & (rows.temperature_R > 0)),
        lambda: _supported(scaled_RV, rows),
        lambda: scaled_RV,
    )
    noise_RV = jax.vmap(partial(_gumbel, size=logits_RV.shape[1]))(rows.seed_R, rows.step_R)
    return jnp.argmax(scaled_RV + noise_RV, axis=-1).astype(jnp.int32)


def _gumbel(seed: jax.Array, step: jax.Array, *, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), step)
    bits_V = jax.random.bits(key, (size,), jnp.uint32)
    # 32 bits with full relative precision near 0, where the winners of a large vocabulary are
    # decided; below 1, so that no token's noise is -inf.
    uniform_V = jnp.minimum((bits_V.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform_V))


def _supported(scaled_RV: jax.Array, rows: SampleRows) -> jax.Array:
    """The rows with -inf outside the support; each row's maximum is 0."""
    vocab = scaled_RV.shape[1]
    scaled_RV = jnp.where(scaled_RV >= jnp.log(rows.min_p_R)[:, None], scaled_RV, -jnp.inf)
    image_RV = _ordered_image(scaled_RV)
    k_R = jnp.where(rows.top_k_R > 0, jnp.minimum(rows.top_k_R, vocab), vocab)

    def k_reach(bound_R: jax.Array) -> jax.Array:
        return jnp.sum(image_RV >= bound_R[:, None], axis=-1, dtype=jnp.int32) >= k_R

    kept_RV = image_RV >= _largest_bound(k_reach, k_R.shape[0])[:, None]
    mass_RV = jnp.where(kept_RV, jnp.exp(scaled_RV), 0.0)
    wanted_R = rows.top_p_R * jnp.sum(mass_RV, axis=-1)

    def mass_reaches(bound_R: jax.Array) -> jax.Array:
        above_RV = jnp.where(image_RV >= bound_R[:, None], mass_RV, 0.0)
        return jnp.sum(above_RV, axis=-1) >= wanted_R

    bound_R = jnp.where(rows.top_p_R < 1, _largest_bound(mass_reaches, k_R.shape[0]), 0)
    kept_RV &= image_RV >= bound_R[:, None]
    return jnp.where(kept_RV, scaled_RV, -jnp.inf)


def _ordered_image(x_RV: jax.Array) -> jax.Array:
    """uint32 that compare as the floats do (no NaN)."""
    bits = jax.lax.bitcast_convert_type(x_RV, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_bound(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """Per row the largest uint32 bound that `holds`; it holds at 0 and fails for good above it."""

    def settle(i: jax.Array, bound_R: jax.Array) -> jax.Array:
        shift = jnp.uint32(32 - _SEARCH_BITS) - jnp.uint32(_SEARCH_BITS) * i.astype(jnp.uint32)
        passed = [holds(bound_R | (jnp.uint32(d) << shift)) for d in range(1, 1 << _SEARCH_BITS)]
        digit_R = sum(p.astype(jnp.uint32) for p in passed)
        return bound_R | (digit_R << shift)

    start_R = jnp.zeros((num_rows,), jnp.uint32)
    return jax.lax.fori_loop(0, 32 // _SEARCH_BITS, settle, start_R)


def _logprobs(
    logits_RV: jax.Array, token_R: jax.Array, rows: SampleRows
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_rows = logits_RV.shape[0]
    ids_V = jnp.arange(logits_RV.shape[1], dtype=jnp.int32)
    no_tops = (
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((num_rows, MAX_LOGPROBS), jnp.float32),
    )

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        total_R = jax.nn.logsumexp(logits_RV, axis=-1)

        def next_best(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            value_R, id_R, top_token_RA, top_logprob_RA = carry
            later = (logits_RV < value_R[:, None]) | (
                (logits_RV == value_R[:, None]) & (ids_V > id_R[:, None])
            )
            rest_RV = jnp.where(later, logits_RV, -jnp.inf)
            id_R = jnp.argmax(rest_RV, axis=-1).astype(jnp.int32)
            value_R = jnp.max(rest_RV, axis=-1)
            return (
                value_R,
                id_R,
                top_token_RA.at[:, i].set(id_R),
                top_logprob_RA.at[:, i].set(value_R - total_R),
            )

        start = (jnp.full((num_rows,), jnp.inf), jnp.full((num_rows,), -1, jnp.int32), *no_tops)
        wanted = jnp.max(rows.num_logprobs_R)
        _, _, top_token_RA, top_logprob_RA = jax.lax.fori_loop(0, wanted, next_best, start)
        chosen_R = jnp.take_along_axis(logits_RV, token_R[:, None], axis=-1)[:, 0]
        return chosen_R - total_R, top_token_RA, top_logprob_RA

    def skip() -> tuple[jax.Array, jax.Array, jax.Array]:
        return (jnp.zeros((num_rows,), jnp.float32), *no_tops)

    return jax.lax.cond(jnp.any(rows.num_logprobs_R >= 0), compute, skip)
