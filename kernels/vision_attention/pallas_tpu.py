"""Vision attention on TPUs: one Pallas kernel whose work follows the segments.

Scores are transposed, keys on sublanes and queries on lanes, and so is the output: V^T P^T. Then
the matrix units hold queries and weights and stream keys and values; values stream only as many
rows as a head is wide, not whole lanes. One more row, of ones, makes that product sum the weights
as well.

There is no running maximum. exp2(logit - shift) is exact for any shift near enough to the row's
largest logit that nothing overflows or vanishes, and a row's logit with itself, which XLA computes
outside, nearly always is. So the weights of a block depend on nothing but its scores: the
compiler overlaps one head's exponentials with the next one's products, and nothing is rescaled.
The sum of weights tells afterwards whether the shift was good; where it was not, the kernel finds
the largest logits and weighs again.

A block of queries takes one of two paths, by data (`ranges.key_ranges`). The wide path visits
large key blocks, without a mask where all queries see them whole. The narrow path, for segments
shorter than a block, cuts queries into groups with key ranges of their own.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.checks import NUM_LANES, precision, round_up
from tpu_vl.kernels.interpret import Target
from tpu_vl.kernels.vision_attention import blocks as block_sizes
from tpu_vl.kernels.vision_attention.blocks import Blocks
from tpu_vl.kernels.vision_attention.ranges import Ranges, key_ranges

_LOG2_E = 1.4426950408889634
_HIDDEN = -1e30  # added to the logits of keys that a query does not see: exp2 gives 0
_MAX_TOTAL = 2.0**80  # sums of weights below it are exact: nothing overflowed
_IN_FLIGHT = 3 * 2**17  # scores that are computed ahead of the sums: they hide the exponentials


def packed(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    bounds_2P: jax.Array,
    num_patches: jax.Array,
    *,
    scale: float,
    target: Target,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Pads rows to a block and heads to whole lanes, transposes, and runs the kernel.

    Args:
        q_PNH, k_PNH, v_PNH, bounds_2P, num_patches, scale: as in `api.vision_attention`.
        target: the chip, and whether to interpret.
        blocks: sizes to take; None: `blocks.pick_blocks`.

    Raises:
        ValueError: the shape does not fit in the chip's VMEM; the message gives the numbers.
    """
    num_rows, num_heads, width = q_PNH.shape
    dtype = q_PNH.dtype.name
    if blocks is None:
        blocks = block_sizes.pick_blocks(num_rows, num_heads, width, dtype, target.chip)
    pad = block_sizes.padded_rows(num_rows, blocks) - num_rows
    lanes, rows = round_up(width, NUM_LANES), block_sizes.value_rows(width, dtype)
    valid_P = jnp.arange(num_rows) < num_patches
    # Zeroed, since a weight of 0 times a NaN value is NaN.
    q_PNH, k_PNH, v_PNH = (jnp.where(valid_P[:, None, None], x, 0) for x in (q_PNH, k_PNH, v_PNH))
    self_PN = jnp.einsum("pnh,pnh->pn", q_PNH, k_PNH, preferred_element_type=jnp.float32)
    ones_N1P = jnp.ones((num_heads, 1, num_rows), dtype)
    values_NWP = jnp.concatenate([jnp.transpose(v_PNH, (1, 2, 0)), ones_N1P], axis=1)
    bounds_2P = jnp.pad(jnp.where(valid_P, bounds_2P, 0), ((0, 0), (0, pad)))
    factor = scale * _LOG2_E
    out_NHP = call(
        key_ranges(bounds_2P, blocks),
        jnp.pad(jnp.swapaxes(q_PNH, 0, 1), ((0, 0), (0, pad), (0, lanes - width))),
        jnp.pad(jnp.swapaxes(k_PNH, 0, 1), ((0, 0), (0, pad), (0, lanes - width))),
        jnp.pad(values_NWP, ((0, 0), (0, rows - width - 1), (0, pad))),
        jnp.pad(self_PN.T[:, None] * factor, ((0, 0), (0, 0), (0, pad))),
        bounds_2P,
        width=width,
        factor=factor,
        target=target,
        blocks=blocks,
    )
    return jnp.transpose(out_NHP[:, :, :num_rows], (2, 0, 1))


def call(
    ranges: Ranges,
    q_NPH: jax.Array,
    k_NPH: jax.Array,
    values_NWP: jax.Array,
    shift_N1P: jax.Array,
    bounds_2P: jax.Array,
    *,
    width: int,
    factor: float,
    target: Target,
    blocks: Blocks,
) -> jax.Array:
    """The pallas_call: padded and transposed operands, transposed results [N, H, P]."""
    num_heads, num_rows, lanes = q_NPH.shape
    rows = values_NWP.shape[1]
    heads, queries, chunk, block = blocks.heads, blocks.queries, blocks.chunk, pl.BlockSpec
    num_chunks = pl.cdiv(num_rows, chunk)

    def chunk_of(i: Any, c: Any, refs: Sequence[Any]) -> Any:
        scalars = Ranges(*refs)
        return jnp.minimum(scalars.chunk_first_I[i] + c, scalars.chunk_last_I[i])

    sums = pltpu.VMEM((heads, rows, queries), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, width=width, factor=factor, blocks=blocks),
        name="vision_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(ranges),
            grid=(num_heads // heads, num_rows // queries, num_chunks),
            in_specs=[
                block((heads, queries, lanes), lambda g, i, *_: (g, i, 0)),
                block((heads, chunk, lanes), lambda g, i, c, *s: (g, chunk_of(i, c, s), 0)),
                block((heads, rows, chunk), lambda g, i, c, *s: (g, 0, chunk_of(i, c, s))),
                block((heads, 1, queries), lambda g, i, *_: (g, 0, i)),
                block((2, queries), lambda _, i, *__: (0, i)),
            ],
            out_specs=block((heads, width, queries), lambda g, i, *_: (g, 0, i)),
            scratch_shapes=[
                pltpu.VMEM((heads, 1, queries), jnp.float32),
                sums,
                *([sums] if num_chunks > 1 else []),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_heads, width, num_rows), q_NPH.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=block_sizes.vmem_limit_bytes(target.chip),
        ),
        interpret=target.interpret,
    )(*ranges, q_NPH, k_NPH, values_NWP, shift_N1P, bounds_2P)


def _kernel(*refs: Any, width: int, factor: float, blocks: Blocks) -> None:
    """One grid step: a group of heads, a block of queries, a chunk of keys."""
    n = len(Ranges._fields)
    step = _Step(Ranges(*refs[:n]), refs[n:], width, factor, blocks)
    total_ref, chunk, num_chunks = step.total_ref, pl.program_id(2), pl.num_programs(2)
    with jax.named_scope("step"):
        if total_ref is None:
            step.weigh_chunk(first=True)
            return

        @pl.when(chunk == 0)
        def _() -> None:
            with jax.named_scope("start"):
                total_ref[...] = jnp.zeros_like(total_ref)

        @pl.when(step.has_work())
        def _() -> None:
            with jax.named_scope("chunk"):
                step.weigh_chunk(first=chunk == 0)
                total_ref[...] += step.sum_ref[...]

        @pl.when(chunk == num_chunks - 1)
        def _() -> None:
            with jax.named_scope("finish"):
                step.write(total_ref)


class _Item(NamedTuple):
    """One product: a head, queries, a tile of keys, what hides them; the first of its visit?"""

    head: int
    queries: slice
    keys: Any
    hidden_YX: jax.Array | None
    first: bool


class _Step:
    """The parts of a grid step.

    `shift_ref` holds what is subtracted of each query's logits, `sum_ref` the weighted values and,
    in row `width`, the weights of this chunk's keys, `total_ref` those of all chunks so far.
    """

    def __init__(
        self, ranges: Ranges, refs: Sequence[Any], width: int, factor: float, blocks: Blocks
    ) -> None:
        self.q_ref, self.k_ref, self.values_ref, self.self_ref, self.bounds_ref = refs[:5]
        self.out_ref, self.shift_ref, self.sum_ref = refs[5:8]
        self.total_ref = refs[8] if len(refs) > 8 else None
        self.width, self.factor, self.blocks = width, factor, blocks
        self.exact = precision(self.q_ref.dtype)
        block = pl.program_id(1)
        self.first, self.last = ranges.first_I[block], ranges.last_I[block]
        self.full_first, self.full_last = ranges.full_first_I[block], ranges.full_last_I[block]
        self.trips = ranges.trips_I[block]
        self.tiles_per_block, num_groups = blocks.keys // blocks.tile, blocks.queries // blocks.tile
        self.group_first_G = [ranges.group_first_GI[g, block] for g in range(num_groups)]
        self.first_tile = 0  # of the chunk
        if self.total_ref is not None:
            self._clip_to_chunk(ranges.chunk_first_I[block] + pl.program_id(2))

    def _clip_to_chunk(self, chunk: Any) -> None:
        per_chunk = self.blocks.chunk // self.blocks.keys
        self.first_tile = chunk * (self.blocks.chunk // self.blocks.tile)
        self.first, self.last, self.full_first, self.full_last = (
            jnp.clip(x, chunk * per_chunk, (chunk + 1) * per_chunk)
            for x in (self.first, self.last, self.full_first, self.full_last)
        )

    def has_work(self) -> Any:
        """Whether this step's chunk holds a key that the block visits."""
        return self.first < self.last

    def weigh_chunk(self, *, first: Any) -> None:
        """Fills `sum_ref`, and the output where all keys are in one chunk.

        The second attempt has exact shifts: it cannot overflow.
        """

        @pl.when(first)
        def _() -> None:
            self.shift_ref[...] = self.self_ref[...]

        def attempt(state: tuple[Any, Any]) -> tuple[Any, Any]:
            with jax.named_scope("attempt"):
                attempts, _ = state

                @pl.when(attempts > 0)
                def _() -> None:
                    with jax.named_scope("raise_shifts"):
                        self._raise_shifts()

                self._weigh()
                overflowed = self._overflowed()
                if self.total_ref is None:
                    self.write(self.sum_ref)  # here, to overlap with the test
                return attempts + 1, jnp.where(attempts == 0, overflowed, 0.0)

        lax.while_loop(lambda state: state[1] > 0, attempt, (jnp.int32(0), jnp.float32(1)))

    def _overflowed(self) -> jax.Array:
        """1.0 if a row of the block has a sum that is not exact, else 0.0."""
        bad_N1X = self._valid_1X()[None] & ~self._good_N1X()
        return jnp.where(bad_N1X, 1.0, 0.0).max()

    def _good_N1X(self) -> jax.Array:
        return self.sum_ref[:, self.width : self.width + 1, :] < _MAX_TOTAL  # NaN is not

    def _valid_1X(self) -> jax.Array:
        return self.bounds_ref[1:2, :] > self.bounds_ref[0:1, :]

    def _raise_shifts(self) -> None:
        """Sets the shifts of rows that overflowed to their largest logits of this chunk."""
        good_N1X = self._good_N1X()
        old_N1X = self.shift_ref[...]
        self.shift_ref[...] = jnp.full_like(old_N1X, _HIDDEN)
        size, per_block, whole = self.blocks.tile, self.tiles_per_block, slice(None)

        def tile(t: Any, carry: int) -> int:
            with jax.named_scope("top_tile"):
                hidden_YX = self._hidden(t * size, size, whole)

                def head_top(head: Any, carry: int) -> int:
                    item = _Item(head, whole, self._keys(t), hidden_YX, True)
                    top_1X = self._logits(item).max(axis=0, keepdims=True)
                    self.shift_ref[head] = jnp.maximum(self.shift_ref[head], top_1X)
                    return carry

                return lax.fori_loop(0, self.blocks.heads, head_top, carry)

        lax.fori_loop(self.first * per_block, self.last * per_block, tile, 0)
        new_N1X = jnp.where(good_N1X, old_N1X, self.shift_ref[...])
        self.shift_ref[...] = new_N1X
        if self.total_ref is not None:
            self.total_ref[...] *= jnp.exp2(old_N1X - new_N1X)

    def _weigh(self) -> None:
        if len(self.group_first_G) == 1:
            self._weigh_wide()
            return

        @pl.when(self.trips == 0)
        def _() -> None:
            with jax.named_scope("wide"):
                self._weigh_wide()

        @pl.when(self.trips > 0)
        def _() -> None:
            with jax.named_scope("narrow"):
                self._weigh_narrow()

    def _weigh_wide(self) -> None:
        size = self.blocks.keys
        num_full = self.full_last - self.full_first

        def full_block(t: Any, carry: int) -> int:
            with jax.named_scope("full_block"):
                self._add_block(t, None, t == self.full_first)
            return carry

        def border_block(t: Any, carry: int) -> int:
            with jax.named_scope("border_block"):
                fresh = (t == self.first) & (num_full == 0)
                t = jnp.where(t < self.full_first, t, t + num_full)
                self._add_block(t, self._hidden(t * size, size, slice(None)), fresh)
            return carry

        lax.fori_loop(self.full_first, self.full_last, full_block, 0)
        lax.fori_loop(self.first, self.last - num_full, border_block, 0)

    def _add_block(self, t: Any, hidden_YX: jax.Array | None, fresh: Any) -> None:
        size, per_block, items = self.blocks.tile, self.tiles_per_block, []
        for head in range(self.blocks.heads):
            for n in range(per_block):
                hidden = None if hidden_YX is None else hidden_YX[n * size : (n + 1) * size]
                keys = self._keys(t * per_block + n)
                items.append(_Item(head, slice(None), keys, hidden, n == 0))
        self._add(items, fresh)

    def _weigh_narrow(self) -> None:
        size = self.blocks.tile
        last_tile = self.first_tile + self.blocks.chunk // size - 1

        def narrow_tiles(r: Any, carry: int) -> int:
            with jax.named_scope("narrow_tiles"):
                items = []
                for group, first in enumerate(self.group_first_G):
                    queries = slice(group * size, (group + 1) * size)
                    t = jnp.clip(first + r, self.first_tile, last_tile)
                    # A tile that is not in this chunk counts as behind all keys.
                    key = jnp.where(t == first + r, t * size, jnp.iinfo(jnp.int32).max // 2)
                    hidden_YX = self._hidden(key, size, queries)
                    for head in range(self.blocks.heads):
                        items.append(_Item(head, queries, self._keys(t), hidden_YX, True))
                self._add(items, r == 0)
            return carry

        lax.fori_loop(0, self.trips, narrow_tiles, 0)

    def _add(self, items: Sequence[_Item], fresh: Any) -> None:
        """Adds products to `sum_ref`, which is empty where `fresh`.

        Scores run ahead of the sums in the order of the matrix units: a sum that waits for its
        exponentials would hold up the scores behind it.
        """
        num_queries = self.sum_ref[0, 0:1, items[0].queries].shape[1]
        ahead = max(1, _IN_FLIGHT // (self.blocks.tile * num_queries))
        weights = [self._weights(item) for item in items[:ahead]]
        for n, item in enumerate(items):
            if n + ahead < len(items):
                weights.append(self._weights(items[n + ahead]))
            old_WX = self.sum_ref[item.head, :, item.queries]
            if item.first:
                old_WX = jnp.where(fresh, 0.0, old_WX)
            self.sum_ref[item.head, :, item.queries] = old_WX + lax.dot_general(
                self.values_ref[item.head, :, item.keys],
                weights[n],
                (((1,), (0,)), ((), ())),
                precision=self.exact,
                preferred_element_type=jnp.float32,
            )

    def _weights(self, item: _Item) -> jax.Array:
        logits_YX = self._logits(item) - self.shift_ref[item.head, :, item.queries]
        return jnp.exp2(logits_YX).astype(self.values_ref.dtype)

    def _logits(self, item: _Item) -> jax.Array:
        logits_YX = self.factor * lax.dot_general(
            self.k_ref[item.head, item.keys, :],
            self.q_ref[item.head, item.queries, :],
            (((1,), (1,)), ((), ())),
            precision=self.exact,
            preferred_element_type=jnp.float32,
        )
        return logits_YX if item.hidden_YX is None else logits_YX + item.hidden_YX

    def _keys(self, tile: Any) -> Any:
        """Where a tile of keys is in the chunk."""
        size = self.blocks.tile
        return pl.ds(pl.multiple_of((tile - self.first_tile) * size, size), size)

    def _hidden(self, first_key: Any, num_keys: int, queries: slice) -> jax.Array:
        """What to add to the logits of keys by queries: 0, or `_HIDDEN` where they differ."""
        start_1X, end_1X = self.bounds_ref[0:1, queries], self.bounds_ref[1:2, queries]
        shape = (num_keys, start_1X.shape[1])
        key_YX = lax.broadcasted_iota(jnp.int32, shape, 0) + first_key
        seen_YX = (key_YX >= start_1X) & (key_YX < end_1X)
        return jnp.where(seen_YX, 0.0, _HIDDEN)

    def write(self, sum_ref: Any) -> None:
        """Divides by the sums of weights; rows of padding become zeros."""
        for head in range(self.blocks.heads):
            share_1X = 1 / sum_ref[head, self.width : self.width + 1, :]
            out_HX = jnp.where(self._valid_1X(), sum_ref[head, : self.width, :] * share_1X, 0)
            self.out_ref[head] = out_HX.astype(self.out_ref.dtype)
