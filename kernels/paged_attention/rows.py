"""The two ends of the paged attention kernel: heads become rows, and rows become results.

Attention addresses single tokens: in its arrays [T, rows, 128] all rows of a token lie together.
Around the kernel products are written [N, T, 128] and read [T, N * 128], with tiles of tokens.
Between the two the kernel itself moves the rows, norms and rotates them on the way, and writes
zeros for padding: block by block of tokens, as far as there are any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.paged_attention import words
from tpu_vl.kernels.paged_attention.plan import Plan, ceil_quotient
from tpu_vl.kernels.paged_attention.rope import Rope

MAX_TOKENS = 128  # of a block
MAX_BYTES = 1 << 20  # of the queries of a block
TILE_TOKENS = 16  # that a tile of heads holds of the narrowest dtype


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Static sizes; hashable.

    Args:
        num_tokens: T, padded to whole blocks.
        block: tokens of a block.
        num_heads: N.
        head_dim: H.
        eps: of the norm of heads; None: heads come normed and rotated, or need neither.
    """

    num_tokens: int
    block: int
    num_heads: int
    head_dim: int
    eps: float | None

    @property
    def num_blocks(self) -> int:
        """Blocks of all tokens."""
        return self.num_tokens // self.block


def make_ends(plan: Plan, q_TNH: jax.Array, eps: float | None) -> Ends:
    """The sizes of a call's ends.

    Raises:
        ValueError: heads wider than the lanes are to be rotated.
    """
    num_tokens, num_heads, width = q_TNH.shape
    if eps is not None and width > NUM_LANES:
        raise ValueError(f"the kernel rotates heads of at most {NUM_LANES}, not {width}")
    token_bytes = num_heads * plan.width * plan.dtype.itemsize
    block, padded = MAX_TOKENS, num_tokens
    if num_tokens > TILE_TOKENS:
        padded = round_up(num_tokens, TILE_TOKENS)
    while block > TILE_TOKENS and (padded % block or block * token_bytes > MAX_BYTES):
        block //= 2
    return Ends(
        num_tokens=padded,
        block=min(block, padded),
        num_heads=num_heads,
        head_dim=width,
        eps=eps,
    )


class Buffers(NamedTuple):
    """Scratch of the ends, two slots each, and the semaphores of their copies.

    Args:
        q_2NXW, k_2KXW, v_2KXW: heads of a block of tokens X.
        tables_22XH: cosines and sines.
        q_2XRH: rows of queries, and of results.
        kv_2XCH: rows of the cache.
        out_2XO: results.
        in_sems, out_sems: one per slot.
    """

    q_2NXW: Any
    k_2KXW: Any
    v_2KXW: Any
    tables_22XH: Any
    q_2XRH: Any
    kv_2XCH: Any
    out_2XO: Any
    in_sems: Any
    out_sems: Any


def scratch(plan: Plan, ends: Ends, table_dtype: Any) -> list[Any]:
    """Shapes of `Buffers`."""
    size, heads, kv_heads = ends.block, ends.num_heads, plan.num_kv_heads
    shapes = [
        ((heads, size, plan.width), plan.dtype),
        ((kv_heads, size, plan.width), plan.dtype),
        ((kv_heads, size, plan.width), plan.dtype),
        ((2, size, NUM_LANES), table_dtype),
        ((size, plan.query_rows, NUM_LANES), plan.dtype),
        ((size, plan.num_rows, NUM_LANES), plan.cache_dtype),
        ((size, heads * plan.width), plan.dtype),
    ]
    arrays = [pltpu.VMEM((2, *shape), dtype) for shape, dtype in shapes]
    return [*arrays, pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))]


def vmem_bytes(plan: Plan, ends: Ends) -> int:
    """What `scratch` takes."""
    shapes = scratch(plan, ends, jnp.float32)[:-2]
    return sum(x.inner_aval.size * x.inner_aval.dtype.itemsize for x in shapes)


def result_heads(plan: Plan, ends: Ends, out_TO: jax.Array, num_tokens: int) -> jax.Array:
    """The kernel's results [T, N * lanes] as [T, N, H]."""
    out = out_TO.reshape(ends.num_tokens, ends.num_heads, plan.width)
    return out[:num_tokens, :, : ends.head_dim]


class Sources(NamedTuple):
    """Whole arrays that the kernel reads; None: no such array.

    Args:
        q_NTW: heads.
        k_NTW, v_NTW: heads; None where the rows of the cache are ready made.
        rows_TCH: those.
        cos_TH, sin_TH: tables of the rotation.
        q_norm_1H, k_norm_1H: weights of the norms; these two in vector memory, the rest in HBM.
    """

    q_NTW: Any
    k_NTW: Any = None
    v_NTW: Any = None
    rows_TCH: Any = None
    cos_TH: Any = None
    sin_TH: Any = None
    q_norm_1H: Any = None
    k_norm_1H: Any = None

    def present(self) -> dict[str, Any]:
        """Those that there are, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}


NORMS = ("q_norm_1H", "k_norm_1H")


def make_sources(
    plan: Plan,
    ends: Ends,
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    rows_TCH: jax.Array | None,
    rope: Rope | None,
) -> Sources:
    """What the kernel reads of a call; `rows_TCH` goes before K and V."""
    heads = (q_TNH,) if rows_TCH is not None else (q_TNH, k_TKH, v_TKH)
    found = Sources(*(_by_head(plan, ends, x) for x in heads))._replace(rows_TCH=rows_TCH)
    if rope is None:
        return found
    return found._replace(
        cos_TH=_padded(rope.cos_TH, ends.num_tokens),
        sin_TH=_padded(rope.sin_TH, ends.num_tokens),
        q_norm_1H=_padded(rope.q_norm_H[None], 1),
        k_norm_1H=_padded(rope.k_norm_H[None], 1),
    )


def _by_head(plan: Plan, ends: Ends, x_TNH: jax.Array) -> jax.Array:
    """[N, T, H] with whole lanes and blocks: what products give, so that nothing moves."""
    x_NTH = jnp.swapaxes(x_TNH, 0, 1)
    tokens, lanes = ends.num_tokens - x_NTH.shape[1], plan.width - x_NTH.shape[2]
    return jnp.pad(x_NTH, ((0, 0), (0, tokens), (0, lanes)))


def _padded(x_XH: jax.Array, num_rows: int) -> jax.Array:
    return jnp.pad(x_XH, ((0, num_rows - x_XH.shape[0]), (0, NUM_LANES - x_XH.shape[1])))


def enter(
    plan: Plan,
    ends: Ends,
    num_tokens: Any,
    sources: Sources,
    q_hbm: Any,
    rows_hbm: Any,
    bufs: Buffers,
) -> None:
    """Writes the rows of the queries, and those of K and V, of all tokens that are no padding.

    Args:
        plan, ends: sizes.
        num_tokens: tokens that are no padding.
        sources: heads.
        q_hbm: [T, query rows, 128].
        rows_hbm: [T, C, 128]; written if `sources` has K and V.
        bufs: scratch.
    """
    num_blocks = ceil_quotient(num_tokens, ends.block)
    size = ends.block

    def tokens(block: Any) -> Any:
        return pl.ds(pl.multiple_of(block * size, size), size)

    def copies_in(block: Any, slot: Any) -> list[Any]:
        pairs = [
            (sources.q_NTW, bufs.q_2NXW.at[slot]),
            (sources.k_NTW, bufs.k_2KXW.at[slot]),
            (sources.v_NTW, bufs.v_2KXW.at[slot]),
        ]
        pairs = [(ref.at[:, tokens(block)], buf) for ref, buf in pairs if ref is not None]
        for i, ref in enumerate((sources.cos_TH, sources.sin_TH)):
            if ref is not None:
                pairs.append((ref.at[tokens(block)], bufs.tables_22XH.at[slot, i]))
        return [pltpu.make_async_copy(a, b, bufs.in_sems.at[slot]) for a, b in pairs]

    def copies_out(block: Any, slot: Any) -> list[Any]:
        pairs = [(bufs.q_2XRH.at[slot], q_hbm)]
        if sources.k_NTW is not None:
            pairs.append((bufs.kv_2XCH.at[slot], rows_hbm))
        return [
            pltpu.make_async_copy(buf, ref.at[tokens(block)], bufs.out_sems.at[slot])
            for buf, ref in pairs
        ]

    def compute(_: Any, slot: Any) -> None:
        q_heads = [bufs.q_2NXW[slot, n] for n in range(ends.num_heads)]
        k_heads = [bufs.k_2KXW[slot, n] for n in range(plan.num_kv_heads)]
        if sources.k_NTW is None:
            k_heads = []
        if ends.eps is not None:
            norms = [sources.q_norm_1H] * len(q_heads) + [sources.k_norm_1H] * len(k_heads)
            turned = _turned(ends, q_heads + k_heads, norms, bufs.tables_22XH.at[slot])
            q_heads, k_heads = turned[: len(q_heads)], turned[len(q_heads) :]
        q_rows = _query_rows(plan, ends, q_heads)
        kv_rows = _cache_rows(plan, k_heads, bufs.v_2KXW.at[slot]) if k_heads else []
        # Stores come last: what is loaded behind a store waits for it.
        _store_rows(plan, bufs.q_2XRH.at[slot], q_rows)
        _store_rows(plan, bufs.kv_2XCH.at[slot], kv_rows)

    _blockwise("enter", num_blocks, copies_in, copies_out, compute)


def leave(
    plan: Plan, ends: Ends, num_tokens: Any, rows_hbm: Any, out_hbm: Any, bufs: Buffers
) -> None:
    """Writes the results of all tokens, zeros for padding.

    Args:
        plan, ends: sizes.
        num_tokens: tokens that are no padding.
        rows_hbm: the results' rows [T, query rows, 128].
        out_hbm: [T, N * lanes].
        bufs: scratch.
    """
    size = ends.block
    num_live = ceil_quotient(num_tokens, size)

    def tokens(block: Any) -> Any:
        return pl.ds(pl.multiple_of(block * size, size), size)

    def copies_in(block: Any, slot: Any) -> list[Any]:
        rows, sem = rows_hbm.at[tokens(block)], bufs.in_sems.at[slot]
        return [pltpu.make_async_copy(rows, bufs.q_2XRH.at[slot], sem)]

    def copies_out(block: Any, slot: Any) -> list[Any]:
        out, sem = out_hbm.at[tokens(block)], bufs.out_sems.at[slot]
        return [pltpu.make_async_copy(bufs.out_2XO.at[slot], out, sem)]

    def compute(block: Any, slot: Any) -> None:
        out_XO = bufs.out_2XO.at[slot]
        _fill_results(plan, ends, bufs.q_2XRH.at[slot], out_XO)

        @pl.when((block + 1) * size > num_tokens)
        def _() -> None:
            with jax.named_scope("leave_clear"):
                token = block * size + lax.broadcasted_iota(jnp.int32, out_XO.shape, 0)
                value = out_XO[...]
                out_XO[...] = jnp.where(token < num_tokens, value, jnp.zeros_like(value))

    _blockwise("leave", num_live, copies_in, copies_out, compute)

    @pl.when(num_live < ends.num_blocks)
    def _() -> None:
        with jax.named_scope("leave_zeros"):
            bufs.out_2XO[0] = jnp.zeros(bufs.out_2XO.shape[1:], plan.dtype)

    @pl.loop(num_live, ends.num_blocks)
    def _(block: Any) -> None:
        with jax.named_scope("leave_zero"):
            copies_out(block, 0)[0].start()

    @pl.loop(num_live, ends.num_blocks)
    def _(block: Any) -> None:
        with jax.named_scope("leave_zero_drain"):
            copies_out(block, 0)[0].wait()


def _blockwise(
    name: str,
    num_blocks: Any,
    copies_in: Callable[[Any, Any], list[Any]],
    copies_out: Callable[[Any, Any], list[Any]],
    compute: Callable[[Any, Any], None],
) -> None:
    """Visits blocks in turns of two slots: one is computed while the other is copied.

    Args:
        name: of the scopes.
        num_blocks: data.
        copies_in, copies_out, compute: of a block in a slot.
    """

    def start(block: Any) -> None:
        for copy in copies_in(block, block & 1):
            copy.start()

    pl.when(num_blocks > 0)(lambda: start(jnp.int32(0)))

    @pl.loop(0, num_blocks)
    def _(block: Any) -> None:
        with jax.named_scope(f"{name}_block"):
            slot = block & 1
            pl.when(block + 1 < num_blocks)(lambda: start(block + 1))

            @pl.when(block >= 2)
            def _() -> None:
                for copy in copies_out(block - 2, slot):
                    copy.wait()

            for copy in copies_in(block, slot):
                copy.wait()
            compute(block, slot)
            for copy in copies_out(block, slot):
                copy.start()

    @pl.loop(jnp.maximum(num_blocks - 2, 0), num_blocks)
    def _(block: Any) -> None:
        with jax.named_scope(f"{name}_drain"):
            for copy in copies_out(block, block & 1):
                copy.wait()


def _lane(x: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def _turned(
    ends: Ends, heads: list[jax.Array], norms: list[Any], tables_2XH: Any
) -> list[jax.Array]:
    """Heads, float32, normed and rotated.

    They go side by side: operations across lanes take long and run in the order of the program,
    so that head by head each would wait for the one before.
    """
    assert ends.eps is not None
    half = ends.head_dim // 2
    cos_XH, sin_XH = (tables_2XH[i].astype(jnp.float32) for i in (0, 1))
    is_first = _lane(sin_XH) < half
    sin_XH = jnp.where(is_first, -sin_XH, sin_XH)
    wide = [x.astype(jnp.float32) for x in heads]
    means = [(x * x).sum(axis=1, keepdims=True) * (1 / ends.head_dim) for x in wide]
    wide = [
        x * lax.rsqrt(mean + ends.eps) * norm_1H[...].astype(jnp.float32)
        for x, mean, norm_1H in zip(wide, means, norms, strict=True)
    ]
    others = [pltpu.roll(x, NUM_LANES - half, 1) for x in wide]
    if ends.head_dim < NUM_LANES:
        others = [
            jnp.where(is_first, other, pltpu.roll(x, half, 1))
            for x, other in zip(wide, others, strict=True)
        ]
    return [x * cos_XH + other * sin_XH for x, other in zip(wide, others, strict=True)]


def _lanes(x_XW: jax.Array, part: int) -> jax.Array:
    return x_XW[:, part * NUM_LANES : (part + 1) * NUM_LANES]


def _query_rows(plan: Plan, ends: Ends, heads: list[jax.Array]) -> list[jax.Array]:
    """Rows of queries, float32; zeros where the kernel has more than there are heads."""
    group = ends.num_heads // plan.num_kv_heads
    heads = [x.astype(jnp.float32) for x in heads]
    rows = []
    for part in range(plan.num_parts):
        for row in range(plan.part_rows):
            kv_head, member = divmod(row, plan.group)
            is_head = kv_head < plan.num_kv_heads and member < group
            found = heads[kv_head * group + member] if is_head else jnp.zeros_like(heads[0])
            rows.append(_lanes(found, part))
    return rows


def _cache_rows(plan: Plan, keys: list[jax.Array], v_KXW: Any) -> list[jax.Array]:
    """Rows of the cache, float32: K and V of each head and part are neighbours."""
    rows: list[jax.Array] = []
    for head, key in enumerate(keys):
        key, value = key.astype(jnp.float32), v_KXW[head].astype(jnp.float32)
        for part in range(plan.num_parts):
            rows += [_lanes(key, part), _lanes(value, part)]
    return rows + [jnp.zeros_like(rows[0])] * (plan.num_rows - len(rows))


def _store_rows(plan: Plan, ref_XRH: Any, rows: list[jax.Array]) -> None:
    """Stores neighbouring rows of every token, word by word."""
    size = words.packing(ref_XRH.dtype)
    for at in range(0, len(rows), size):
        packed = words.pack(rows[at : at + size], ref_XRH.dtype, interpreted=plan.interpreted)
        words.store(ref_XRH, at // size, packed, interpreted=plan.interpreted)


def _fill_results(plan: Plan, ends: Ends, rows_XRH: Any, out_XO: Any) -> None:
    group, size = ends.num_heads // plan.num_kv_heads, words.packing(plan.dtype)
    for head in range(ends.num_heads):
        kv_head, member = divmod(head, group)
        for part in range(plan.num_parts):
            row = part * plan.part_rows + kv_head * plan.group + member
            found = words.load(rows_XRH, row // size, interpreted=plan.interpreted)
            lanes = words.unpack(found, row % size, plan.dtype, plan.dtype)
            at = head * plan.width + part * NUM_LANES
            out_XO[:, at : at + NUM_LANES] = lanes
