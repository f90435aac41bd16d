"""Attention of runs of new tokens: prefill, chunks of prompts.

Scores are transposed, [keys, queries]: the softmax reduces over sublanes, by plain vector
operations, and the weighted sum [H, queries] fills the whole width of the matrix unit. The queries
of a K/V head stand as columns in the order in which 32-bit words hold them: word, token, row.

exp2(logit - shift) is exact for any shift near enough to a row's largest logit that nothing
overflows. A tile begins with the largest logits of its first few keys as shifts. Blocks that all
its queries see take the shifts as they are (`quick`), which leaves nothing to wait for between
their products. Blocks on the causal border go by short steps, of which none is behind the border;
they mask and raise the shifts (`careful`). A tile whose total shows an overflow is done again, all
blocks careful.
"""

import math
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
from tpu_vl.kernels.paged_attention.plan import Plan, ceil_quotient, quotient
from tpu_vl.kernels.paged_attention.stream import Item, Stream, ring

COLUMNS = 256  # queries of one product: the width of a matrix unit
KEYS = 256  # keys of one product, and of a careful step: the depth of a matrix unit
AHEAD = 8  # products whose scores are known before they are summed: they hide the exponentials
FIRST_KEYS = 32  # give a tile its shifts: few, since nearly any shift is near enough
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
    """Takes keys into all heads.

    Scores of the next products are asked for before the weighted sum of this one: in the order of
    the matrix unit a sum that waits for its exponentials would hold up the scores behind it.

    Args:
        plan: sizes.
        kv_ref: the keys' rows [X, C, 128].
        q_ref: the tile's queries.
        factors: of a head's logits, for powers of two.
        limits: None: quick: all queries see the keys and the shifts stay. Else careful, at most
            `KEYS` keys: how many of them the tile's first query sees, and how many exist.
        state: scratch.
    """
    num_columns, num_keys = plan.blocks.prefill_rows, kv_ref.shape[0]
    heads = range(plan.num_kv_heads)
    keys = [load_head(plan, kv_ref, head, 0) for head in heads]
    values = [_values(plan, kv_ref, head, limits) for head in heads]
    queries = [load_queries(plan, q_ref, head) for head in heads]
    items = [
        (head, columns, part)
        for head in heads
        for columns in _slices(num_columns, COLUMNS)
        for part in _slices(num_keys, KEYS)
    ]

    def weigh(at: int, columns: slice, part: slice) -> tuple[jax.Array, jax.Array | None]:
        logits_XR = dot(plan, keys[at][part], queries[at][columns], 1) * factors(at)
        shift_1R, decay_1R = state.shift_K1R[at, :, columns], None
        if limits is not None:
            key_XR = lax.broadcasted_iota(jnp.int32, logits_XR.shape, 0)
            seen_1R = limits[0] + token_of(plan, num_columns)[:, columns]
            logits_XR = jnp.where(key_XR < seen_1R, logits_XR, MASKED)
            old_1R = shift_1R
            shift_1R = jnp.maximum(old_1R, logits_XR.max(axis=0, keepdims=True))
            decay_1R = jnp.exp2(old_1R - shift_1R)
            state.shift_K1R[at, :, columns] = shift_1R
        weights_XR = jnp.exp2(logits_XR - shift_1R)
        total_SR = state.total_KSR[at, :, columns]
        total_SR = total_SR if decay_1R is None else total_SR * decay_1R
        state.total_KSR[at, :, columns] = total_SR + _sublane_groups(weights_XR)
        return weights_XR.astype(plan.dtype), decay_1R

    weighed = [weigh(*item) for item in items[:AHEAD]]
    for n, (at, columns, part) in enumerate(items):
        if n + AHEAD < len(items):
            weighed.append(weigh(*items[n + AHEAD]))
        weights_XR, decay_1R = weighed[n]
        sum_HR = state.sum_KHR[at, :, columns]
        sum_HR = sum_HR if decay_1R is None else sum_HR * decay_1R
        state.sum_KHR[at, :, columns] = sum_HR + dot(plan, values[at][:, part], weights_XR, 0)


def _slices(size: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def _values(plan: Plan, kv_ref: Any, head: int, limits: tuple[Any, Any] | None) -> jax.Array:
    """V of a head, turned: [H, X]; zero where a token does not exist."""
    v_XH = load_head(plan, kv_ref, head, 1)
    if limits is not None:
        slot_XH = lax.broadcasted_iota(jnp.int32, v_XH.shape, 0)
        v_XH = jnp.where(slot_XH < limits[1], v_XH, jnp.zeros_like(v_XH))
    return v_XH.T


def set_shifts(
    plan: Plan, kv_ref: Any, q_ref: Any, factors: Callable[[int], Any], seen: Any, state: State
) -> None:
    """Sets the shifts to the largest logits of a tile's first keys, those that its queries see.

    Args:
        plan: sizes.
        kv_ref: the rows of the first keys [X, C, 128].
        q_ref: the tile's queries.
        factors: of a head's logits, for powers of two.
        seen: how many of the keys the tile's first query sees, at least 1.
        state: scratch.
    """
    for head in range(plan.num_kv_heads):
        k_XH, q_RH = load_head(plan, kv_ref, head, 0), load_queries(plan, q_ref, head)
        logits_XR = dot(plan, k_XH, q_RH, 1) * factors(head)
        key_XR = lax.broadcasted_iota(jnp.int32, logits_XR.shape, 0)
        logits_XR = jnp.where(key_XR < seen + token_of(plan, q_RH.shape[0]), logits_XR, MASKED)
        state.shift_K1R[head] = logits_XR.max(axis=0, keepdims=True)


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

    def attempt(self, first: Any, careful_tile: Any) -> tuple[Any, Any]:
        """Visits tiles from `first` on until one overflows; `careful_tile` cannot.

        Returns:
            The tile to go on with, and to take carefully: the one that overflowed, else none.
        """
        stream, num_bufs = self.stream, self.stream.num_bufs
        window, far = [], stream.first_item(first)
        for slot in range(num_bufs - 1):
            self._fetch_queries(far)
            stream.start_part(far, slot, f"prefill_first_page_{slot}")
            window.append(far)
            far = stream.following(far)

        def unfinished(carry: Any) -> Any:
            (now, *_), _, _, overflowed = carry
            return (now.left > 0) & (overflowed < 0)

        def step(carry: Any) -> Any:
            (now, *later), far, index, _ = carry
            with jax.named_scope("prefill_block"):
                self._fetch(far, ring(index + num_bufs - 1, num_bufs))
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

    def _fetch(self, item: Item, slot: Any) -> None:
        stream, full = self.stream, item.left >= self.stream.block
        self._fetch_queries(item)

        @pl.when(full)  # most are: without a loop around the copies they start faster
        def _() -> None:
            with jax.named_scope("prefill_full_pages"):
                stream.start_full(item, slot)

        @pl.when(jnp.logical_not(full))
        def _() -> None:
            stream.start_part(item, slot, "prefill_page")

    def _fetch_queries(self, item: Item) -> None:
        @pl.when((item.block == 0) & (item.left > 0))
        def _() -> None:
            self.stream.query_copy(item.tile).start()

    def _wait_queries(self, item: Item) -> None:
        @pl.when((item.block == 0) & (item.left > 0))
        def _() -> None:
            self.stream.query_copy(item.tile).wait()

    def _take_in(self, item: Item, slot: Any, careful_tile: Any) -> None:
        stream, plan, state = self.stream, self.plan, self.state
        self._wait_queries(item)

        stream.wait_part(item, slot)
        kv_ref = stream.kv_bufs.at[slot]
        q_ref = stream.q_bufs.at[ring(item.tile, stream.num_bufs)]
        seen = item.left - stream.tiles.num_rows(item.tile) + 1  # by the tile's first token

        @pl.when(item.block == 0)
        def _() -> None:
            with jax.named_scope("prefill_start"):
                state.total_KSR[...] = jnp.zeros_like(state.total_KSR)
                state.sum_KHR[...] = jnp.zeros_like(state.sum_KHR)
                first_ref = kv_ref.at[pl.ds(0, FIRST_KEYS)]
                set_shifts(plan, first_ref, q_ref, self.factors, seen, state)

        quick = (item.tile != careful_tile) & (seen >= stream.block)

        @pl.when(quick)
        def _() -> None:
            with jax.named_scope("prefill_quick"):
                take_in(plan, kv_ref, q_ref, self.factors, None, state)

        @pl.when(jnp.logical_not(quick))
        def _() -> None:
            size = math.gcd(KEYS, stream.block)

            @pl.loop(0, ceil_quotient(jnp.minimum(item.left, stream.block), size))
            def _(part: Any) -> None:
                with jax.named_scope("prefill_careful"):
                    start = pl.multiple_of(part * size, size)
                    limits = (seen - start, item.left - start)
                    part_ref = kv_ref.at[pl.ds(start, size)]
                    take_in(plan, part_ref, q_ref, self.factors, limits, state)

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
