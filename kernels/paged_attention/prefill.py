"""Attention of runs of new tokens: prefill, chunks of prompts.

Scores are transposed, [keys, queries]: the softmax reduces over sublanes, by plain vector
operations, and the weighted sum [H, queries] fills the whole width of the matrix unit. The queries
of a K/V head stand as columns in the order in which 32-bit words hold them: word, token, row.

exp2(logit - shift) is exact for any shift near enough to a row's largest logit that nothing
overflows. So only the first block of a tile and blocks on its causal border look for the largest
logit (`careful`); the others take the shift as it is (`quick`), which leaves nothing to wait for
between their products. A tile whose total shows an overflow is done again, all blocks careful.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.checks import NUM_LANES
from tpu_vl.kernels.online_softmax import MASKED
from tpu_vl.kernels.paged_attention import words
from tpu_vl.kernels.paged_attention.blocks import SUBLANES
from tpu_vl.kernels.paged_attention.heads import dot, load_head
from tpu_vl.kernels.paged_attention.plan import Plan, quotient
from tpu_vl.kernels.paged_attention.stream import Item, Stream, ring

CHUNK = 256  # columns of one product: the width of a matrix unit
MAX_TOTAL = 2.0**100  # a total below it has lost nothing


class State(NamedTuple):
    """Scratch of the rows so far, per K/V head, columns R as queries: float32.

    Args:
        shift_K1R: what is subtracted of the logits: a logit of the row near its largest.
        total_KSR: weights; the sum of the sublanes counts.
        sum_KHR: weighted values.
    """

    shift_K1R: Any
    total_KSR: Any
    sum_KHR: Any


def scratch(plan: Plan) -> list[Any]:
    """Shapes of `State`."""
    heads, rows = plan.num_kv_heads, plan.blocks.prefill_rows
    return [pltpu.VMEM((heads, size, rows), jnp.float32) for size in (1, SUBLANES, plan.width)]


def load_queries(plan: Plan, q_ref: Any, head: int) -> jax.Array:
    """Queries [R, H] of a head of one tile [tokens, rows, 128]."""
    parts = []
    for part in range(plan.num_parts):
        found = [
            words.split_rows(
                words.load(q_ref, _word(plan, head, part, word), interpreted=plan.interpreted),
                plan.dtype,
            )
            for word in range(plan.group // words.packing(plan.dtype))
        ]
        parts.append(jnp.concatenate(found, axis=0))
    return jnp.concatenate(parts, axis=1)


def store_results(plan: Plan, out_ref: Any, head: int, result_HR: jax.Array) -> None:
    """Writes the results of a head, columns as in `load_queries`."""
    result_RH = result_HR.T.astype(plan.dtype)
    num_words = plan.group // words.packing(plan.dtype)
    rows = result_RH.shape[0] // num_words
    for part in range(plan.num_parts):
        for word in range(num_words):
            lanes = result_RH[:, part * NUM_LANES : (part + 1) * NUM_LANES]
            words.store(
                out_ref,
                _word(plan, head, part, word),
                words.pack_rows(lanes[word * rows : (word + 1) * rows]),
                interpreted=plan.interpreted,
            )


def _word(plan: Plan, head: int, part: int, word: int) -> int:
    """Column of query words of a head."""
    per_word = words.packing(plan.dtype)
    return (part * plan.part_rows + head * plan.group) // per_word + word


def _sublane_groups(weights_XR: jax.Array) -> jax.Array:
    return weights_XR.reshape(-1, SUBLANES, weights_XR.shape[1]).sum(axis=0)


def take_in(
    plan: Plan,
    kv_ref: Any,
    q_ref: Any,
    factors: Callable[[int], Any],
    limits: tuple[Any, Any] | None,
    state: State,
) -> None:
    """Takes a key block into all heads.

    Scores of the next product are asked for before the weighted sum of this one: in the order of
    the matrix unit a sum that waits for its exponentials would hold up the scores behind it.

    Args:
        plan: sizes.
        kv_ref: the block's rows [X, C, 128].
        q_ref: the tile's queries.
        factors: of a head's logits, for powers of two.
        limits: None: quick: all queries see the block and the shifts stay. Else careful: tokens of
            the block that the tile's first query sees, and those that exist.
        state: scratch.
    """
    num_columns = plan.blocks.prefill_rows
    chunks = [slice(at, min(at + CHUNK, num_columns)) for at in range(0, num_columns, CHUNK)]
    heads = range(plan.num_kv_heads)
    items = [(head, chunk) for head in heads for chunk in chunks]
    keys = [load_head(plan, kv_ref, head, 0) for head in heads]
    values = [_values(plan, kv_ref, head, limits) for head in heads]
    queries = [load_queries(plan, q_ref, head) for head in heads]

    def weigh(at: int, chunk: slice) -> tuple[jax.Array, jax.Array | None]:
        logits_XR = dot(plan, keys[at], queries[at][chunk], 1) * factors(at)
        shift_1R, decay_1R = state.shift_K1R[at, :, chunk], None
        if limits is not None:
            key_XR = lax.broadcasted_iota(jnp.int32, logits_XR.shape, 0)
            seen_1R = limits[0] + token_of(plan, num_columns)[:, chunk]
            logits_XR = jnp.where(key_XR < seen_1R, logits_XR, MASKED)
            old_1R = shift_1R
            shift_1R = jnp.maximum(old_1R, logits_XR.max(axis=0, keepdims=True))
            decay_1R = jnp.exp2(old_1R - shift_1R)
            state.shift_K1R[at, :, chunk] = shift_1R
        weights_XR = jnp.exp2(logits_XR - shift_1R)
        total_SR = state.total_KSR[at, :, chunk]
        total_SR = total_SR if decay_1R is None else total_SR * decay_1R
        state.total_KSR[at, :, chunk] = total_SR + _sublane_groups(weights_XR)
        return weights_XR.astype(plan.dtype), decay_1R

    weighed = weigh(*items[0])
    for n, (at, chunk) in enumerate(items):
        weights_XR, decay_1R = weighed
        if n + 1 < len(items):
            weighed = weigh(*items[n + 1])
        sum_HR = state.sum_KHR[at, :, chunk]
        sum_HR = sum_HR if decay_1R is None else sum_HR * decay_1R
        state.sum_KHR[at, :, chunk] = sum_HR + dot(plan, values[at], weights_XR, 0)


def _values(plan: Plan, kv_ref: Any, head: int, limits: tuple[Any, Any] | None) -> jax.Array:
    """V of a head, turned: [H, X]; zero where a token does not exist."""
    v_XH = load_head(plan, kv_ref, head, 1)
    if limits is not None:
        slot_XH = lax.broadcasted_iota(jnp.int32, v_XH.shape, 0)
        v_XH = jnp.where(slot_XH < limits[1], v_XH, jnp.zeros_like(v_XH))
    return v_XH.T


def token_of(plan: Plan, num_columns: int) -> jax.Array:
    """The tile's token that each column stands for, int32 [1, R]."""
    per_word = words.packing(plan.dtype)
    run_length = num_columns // plan.group * per_word
    column_1R = lax.broadcasted_iota(jnp.int32, (1, num_columns), 1)
    return quotient(column_1R & (run_length - 1), per_word)


class _Phase:
    """The loop over key blocks of all tiles, and what a tile needs at its start and end."""

    def __init__(
        self,
        stream: Stream,
        factors: Callable[[int], Any],
        value_scales: Callable[[int], Any],
        state: State,
    ) -> None:
        self.stream, self.plan, self.state = stream, stream.plan, state
        self.factors, self.value_scales = factors, value_scales
        self.ahead = stream.num_bufs - 1

    def attempt(self, first: Any, careful_tile: Any) -> tuple[Any, Any]:
        """Visits tiles from `first` on until one overflows; `careful_tile` cannot.

        Returns:
            The tile to go on with, and to take carefully: the one that overflowed, else none.
        """
        stream, num_bufs = self.stream, self.stream.num_bufs
        window, far = [], stream.first_item(first)
        for slot in range(num_bufs - 1):
            self._fetch(far, slot, f"prefill_first_page_{slot}")
            window.append(far)
            far = stream.following(far)

        def unfinished(carry: Any) -> Any:
            (now, *_), _, _, overflowed = carry
            return (now.left > 0) & (overflowed < 0)

        def step(carry: Any) -> Any:
            (now, *later), far, index, _ = carry
            with jax.named_scope("prefill_block"):
                self._fetch(far, ring(index + num_bufs - 1, num_bufs), "prefill_page")
                self._take_in(now, ring(index, num_bufs), careful_tile)
                last = now.left <= stream.block
                overflowed = lax.cond(
                    last, lambda: self._finish(now.tile, careful_tile), lambda: jnp.int32(-1)
                )
            return (*later, far), stream.following(far), index + 1, overflowed

        carry = (tuple(window), far, jnp.int32(0), jnp.int32(-1))
        window, _, index, overflowed = lax.while_loop(unfinished, step, carry)
        for offset, item in enumerate(window):  # what is still in flight after an overflow
            self._wait_queries(item)
            stream.wait_part(item, ring(index + offset, num_bufs))
        return jnp.where(overflowed < 0, stream.tiles.num_tiles, overflowed), overflowed

    def _fetch(self, item: Item, slot: Any, scope: str) -> None:
        stream = self.stream

        @pl.when((item.block == 0) & (item.left > 0))
        def _() -> None:
            stream.query_copy(item.tile).start()

        stream.start_part(item, slot, scope)

    def _wait_queries(self, item: Item) -> None:
        @pl.when((item.block == 0) & (item.left > 0))
        def _() -> None:
            self.stream.query_copy(item.tile).wait()

    def _take_in(self, item: Item, slot: Any, careful_tile: Any) -> None:
        stream, plan, state = self.stream, self.plan, self.state
        self._wait_queries(item)

        @pl.when(item.block == 0)
        def _() -> None:
            with jax.named_scope("prefill_start"):
                for ref, value in zip(state, (MASKED, 0.0, 0.0), strict=True):
                    ref[...] = jnp.full(ref.shape, value, jnp.float32)

        stream.wait_part(item, slot)
        kv_ref = stream.kv_bufs.at[slot]
        q_ref = stream.q_bufs.at[ring(item.tile, stream.num_bufs)]
        seen = item.left - stream.tiles.num_rows(item.tile) + 1  # by the tile's first token
        plain = (item.block > 0) & (item.tile != careful_tile) & (seen >= stream.block)

        @pl.when(plain)
        def _() -> None:
            with jax.named_scope("prefill_quick"):
                take_in(plan, kv_ref, q_ref, self.factors, None, state)

        @pl.when(jnp.logical_not(plain))
        def _() -> None:
            with jax.named_scope("prefill_careful"):
                take_in(plan, kv_ref, q_ref, self.factors, (seen, item.left), state)

    def _finish(self, tile: Any, careful_tile: Any) -> Any:
        """Writes a tile's results; returns the tile instead if it overflowed, else -1."""
        stream, plan, state = self.stream, self.plan, self.state
        with jax.named_scope("prefill_finish"):
            num_columns = plan.blocks.prefill_rows
            live_1R = token_of(plan, num_columns) < stream.tiles.num_rows(tile)
            total_KR = state.total_KSR[...].sum(axis=1)
            lost_KR = live_1R & jnp.logical_not(total_KR < MAX_TOTAL)  # not a number is lost, too
            lost = jnp.where(lost_KR, 1.0, 0.0).max() > 0
            overflowed = lost & (tile != careful_tile)
            pl.when(jnp.logical_not(overflowed))(lambda: self._write(tile))
            return jnp.where(overflowed, tile, -1)

    def _write(self, tile: Any) -> None:
        stream, plan, state = self.stream, self.plan, self.state
        pl.when(tile > 0)(lambda: stream.result_copy(tile - 1).wait())

        for head in range(plan.num_kv_heads):
            total_1R = state.total_KSR[head].sum(axis=0, keepdims=True)
            result_HR = state.sum_KHR[head] / total_1R
            if plan.quantised:
                result_HR = result_HR * self.value_scales(head)
            store_results(plan, stream.out_bufs.at[0], head, result_HR)
        stream.result_copy(tile).start()


def run(
    stream: Stream,
    factors: Callable[[int], Any],
    value_scales: Callable[[int], Any],
    state: State,
) -> None:
    """Visits all tiles of the prefill phase; the new tokens' K and V are in the pages.

    Args:
        stream: tiles and their copies.
        factors: of a head's logits.
        value_scales: float32 scale of a head's V, where the pages are quantised.
        state: scratch.
    """
    phase, num_tiles = _Phase(stream, factors, value_scales, state), stream.tiles.num_tiles

    def attempt(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        with jax.named_scope("prefill_attempt"):
            return phase.attempt(*carry)

    start = (jnp.int32(0), jnp.int32(-1))
    lax.while_loop(lambda carry: carry[0] < num_tiles, attempt, start)

    @pl.when(num_tiles > 0)
    def _() -> None:
        stream.result_copy(num_tiles - 1).wait()
