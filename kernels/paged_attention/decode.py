"""Attention of single tokens: sequences that decode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.checks import NUM_LANES
from tpu_vl.kernels.online_softmax import MASKED
from tpu_vl.kernels.paged_attention.heads import dot, load_head
from tpu_vl.kernels.paged_attention.plan import Plan, quotient
from tpu_vl.kernels.paged_attention.stream import Item, Stream, ring


class State(NamedTuple):
    """Scratch of the rows so far, per row group g: float32.

    Args:
        logits_gRX: of the block whose logits are known.
        top_gRL: a row's largest logit, in all lanes.
        total_gRL: its weights; the sum of the lanes counts.
        sum_gRH: weighted values.
    """

    logits_gRX: Any
    top_gRL: Any
    total_gRL: Any
    sum_gRH: Any


def scratch(plan: Plan, keys: int) -> list[Any]:
    """Shapes of `State`."""
    shape = (num_groups(plan), plan.decode_rows)
    widths = (keys, NUM_LANES, NUM_LANES, plan.width)
    return [pltpu.VMEM((*shape, width), jnp.float32) for width in widths]


def heads_of(plan: Plan, rows: int) -> list[int]:
    """K/V heads whose queries lie in row group `rows`."""
    per_group = plan.decode_rows // plan.group
    first = rows * per_group
    return list(range(first, min(first + per_group, plan.num_kv_heads)))


def num_groups(plan: Plan) -> int:
    """Row groups of one token."""
    return plan.part_rows // plan.decode_rows


def load_queries(plan: Plan, q_ref: Any) -> tuple[jax.Array, ...]:
    """Queries [rows, H] of each row group of one token."""
    rows = plan.decode_rows
    return tuple(
        jnp.concatenate(
            [
                q_ref[pl.ds(part * plan.part_rows + group * rows, rows), :]
                for part in range(plan.num_parts)
            ],
            axis=1,
        )
        for group in range(num_groups(plan))
    )


def scores(
    plan: Plan,
    kv_ref: Any,
    queries: tuple[jax.Array, ...],
    factors: Callable[[int], Any],
    num_left: Any | None,
) -> list[jax.Array]:
    """Logits [rows, X] of each row group against one key block, for powers of two.

    Args:
        plan: sizes.
        kv_ref: the block's rows [X, C, 128].
        queries: of `load_queries`.
        factors: float32 factor of each head's logits.
        num_left: tokens of the block that count; None: all, unmasked.
    """
    found = []
    for group, q in enumerate(queries):
        logits = None
        for i, head in enumerate(heads_of(plan, group)):
            one = dot(plan, q, load_head(plan, kv_ref, head, 0), 1) * factors(head)
            logits = one if logits is None else jnp.where(_head(plan, one) == i, one, logits)
        assert logits is not None
        if num_left is not None:
            key = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            logits = jnp.where(key < num_left, logits, MASKED)
        found.append(logits)
    return found


def take_in(plan: Plan, kv_ref: Any, num_left: Any | None, group: int, state: State) -> None:
    """Takes the block whose logits are known into one row group.

    Args:
        plan: sizes.
        kv_ref: the block's rows [X, C, 128].
        num_left: tokens of the block that count; None: all.
        group: index of the row group.
        state: scratch.
    """
    heads = heads_of(plan, group)
    logits, old_top = state.logits_gRX[group], state.top_gRL[group]
    top = jnp.maximum(old_top, logits.max(axis=1, keepdims=True))
    weights = jnp.exp2(logits - _repeat(top, logits.shape[1]))
    decay = jnp.exp2(old_top - top)
    state.top_gRL[group] = top
    state.total_gRL[group] = state.total_gRL[group] * decay + sum(_lane_groups(weights))
    acc = state.sum_gRH[group] * _repeat(decay, plan.width)
    for i, head in enumerate(heads):
        v_XH = load_head(plan, kv_ref, head, 1)
        if num_left is not None:
            slot = lax.broadcasted_iota(jnp.int32, v_XH.shape, 0)
            v_XH = jnp.where(slot < num_left, v_XH, jnp.zeros_like(v_XH))
        own = weights if len(heads) == 1 else jnp.where(_head(plan, weights) == i, weights, 0)
        acc = acc + dot(plan, own.astype(plan.dtype), v_XH, 0)
    state.sum_gRH[group] = acc


def _repeat(lanes: jax.Array, width: int) -> jax.Array:
    return jnp.concatenate([lanes] * (width // NUM_LANES), axis=1)


def _lane_groups(rows: jax.Array) -> list[jax.Array]:
    return [rows[:, at : at + NUM_LANES] for at in range(0, rows.shape[1], NUM_LANES)]


def _head(plan: Plan, rows: jax.Array) -> jax.Array:
    """Which of its group's K/V heads each row belongs to."""
    return quotient(lax.broadcasted_iota(jnp.int32, rows.shape, 0), plan.group)


def store_results(
    plan: Plan, out_ref: Any, state: State, value_scales: Callable[[int], Any]
) -> None:
    """Writes one token's results: sums over totals, times V's scales."""
    rows = plan.decode_rows
    for group in range(num_groups(plan)):
        result = state.sum_gRH[group] / state.total_gRL[group].sum(axis=1, keepdims=True)
        if plan.quantised:
            head_R = _head(plan, result)
            scale = jnp.zeros_like(result)
            for i, head in enumerate(heads_of(plan, group)):
                scale = jnp.where(head_R == i, value_scales(head), scale)
            result = result * scale
        for part, lanes in enumerate(_lane_groups(result)):
            at = pl.ds(part * plan.part_rows + group * rows, rows)
            out_ref[at, :] = lanes.astype(plan.dtype)


def run(
    stream: Stream,
    num_items: Any,
    land: Any,
    factors: Callable[[int], Any],
    value_scales: Callable[[int], Any],
    state: State,
) -> None:
    """Visits all tiles of the decode phase, one key block per iteration.

    The blocks of all tiles form one pipeline: an iteration starts the copies of a block to come,
    computes the logits of the next block and takes in the block whose logits are known. The three
    do not wait for each other, and none waits at the end of a tile.

    Args:
        stream: tiles of one token and their copies.
        num_items: key blocks of all tiles.
        land: called before a copy that may read what this call writes: waits for the writes.
        factors: of the logits, per head.
        value_scales: float32 scale of V per head, where the pages are quantised.
        state: scratch.
    """
    plan, tiles, size = stream.plan, stream.tiles, stream.block
    ahead = stream.num_bufs - 1  # from the block that is taken in to the one that is fetched

    def prepare(item: Item) -> None:
        @pl.when((item.block == 0) & (item.left > 0))
        def _() -> None:
            stream.query_copy(item.tile).start()

        pl.when((item.left > 0) & (item.left <= size))(land)

    def first(index: Any, item: Item) -> Item:
        prepare(item)
        stream.start_part(item, index, f"decode_first_page_{index}")
        return stream.following(item)

    def step(index: Any, carry: Any) -> Any:
        with jax.named_scope("decode_block"):
            return visit(index, carry)

    def visit(index: Any, carry: Any) -> Any:
        (now, coming, *later), far = carry
        following = stream.following(far)  # here, since its loads overlap with the slots' sums
        slot_now, slot_coming, slot_far = (
            ring(index + offset, stream.num_bufs) for offset in (stream.num_bufs - 1, 0, ahead - 1)
        )
        prepare(far)

        @pl.when((coming.block == 0) & (coming.left > 0))
        def _() -> None:
            stream.query_copy(coming.tile).wait()

        q_slot = ring(coming.tile, stream.num_bufs)
        pl.when(now.block == 0)(restart)

        def both(coming_left: Any | None, now_left: Any | None) -> None:
            queries = load_queries(plan, stream.q_bufs.at[q_slot, 0])
            found = scores(plan, stream.kv_bufs.at[slot_coming], queries, factors, coming_left)
            for group in range(num_groups(plan)):
                take_in(plan, stream.kv_bufs.at[slot_now], now_left, group, state)
            for group, logits in enumerate(found):
                state.logits_gRX[group] = logits

        least = jnp.minimum(jnp.minimum(now.left, coming.left), far.left)

        @pl.when(least >= size)
        def _() -> None:
            with jax.named_scope("decode_full"):
                stream.start_full(far, slot_far)
                stream.wait_full(slot_coming)
                both(None, None)

        @pl.when(least < size)
        def _() -> None:
            with jax.named_scope("decode_part"):
                stream.start_part(far, slot_far, "decode_page")
                stream.wait_part(coming, slot_coming)
                both(coming.left, now.left)

        @pl.when((now.left > 0) & (now.left <= size))
        def _() -> None:
            with jax.named_scope("decode_finish"):
                finish(now.tile)

        return (coming, *later, far), following

    def restart() -> None:
        state.top_gRL[...] = jnp.full(state.top_gRL.shape, MASKED, jnp.float32)
        state.total_gRL[...] = jnp.zeros(state.total_gRL.shape, jnp.float32)
        state.sum_gRH[...] = jnp.zeros(state.sum_gRH.shape, jnp.float32)

    def finish(tile: Any) -> None:
        num_out = stream.out_bufs.shape[0]
        pl.when(tile >= num_out)(lambda: stream.result_copy(tile - num_out).wait())
        store_results(plan, stream.out_bufs.at[ring(tile, num_out), 0], state, value_scales)
        stream.result_copy(tile).start()

    none = Item(jnp.int32(-1), jnp.int32(0), jnp.int32(0))
    window = [none]
    far = stream.first_item(jnp.int32(0))
    for index in range(ahead - 1):
        window.append(far)
        far = first(index, far)
    state.logits_gRX[...] = jnp.zeros(state.logits_gRX.shape, jnp.float32)
    steps = jnp.where(num_items > 0, num_items + 1, 0)
    lax.fori_loop(0, steps, step, (tuple(window), far))
    oldest = jnp.maximum(tiles.num_tiles - stream.out_bufs.shape[0], 0)

    @pl.loop(oldest, tiles.num_tiles)
    def _(tile: Any) -> None:
        with jax.named_scope("decode_drain"):
            stream.result_copy(tile).wait()
