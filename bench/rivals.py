"""The attention kernels that jax ships, as `bench.kernels` measures them beside ours."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention as flash_kernel
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from bench import own
from bench.programs import Call
from tpu_vl.kernels.checks import NUM_LANES, round_up

S = jax.ShapeDtypeStruct
VMEM_LIMIT_BYTES = 64 << 20


@contextlib.contextmanager
def named_blocks() -> Iterator[None]:
    """While it lasts, kernels that are traced get a named scope per function, as ours have.

    The scope "kernel" is a grid step; `pl.when` and `lax.while_loop` bodies are called what the
    shipped sources call them.
    """
    pallas_call, when, while_loop = pl.pallas_call, pl.when, jax.lax.while_loop

    def named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(name):
                return run(*args, **kwargs)

        return inner

    def by_name(run: Callable[..., Any]) -> Callable[..., Any]:
        # The interpreter loops too.
        shipped = getattr(run, "__module__", "").startswith("jax.experimental.pallas.ops.tpu")
        return named(run.__name__, run) if shipped else run

    with (
        mock.patch.object(
            pl, "pallas_call", lambda run, **kw: pallas_call(named("kernel", run), **kw)
        ),
        mock.patch.object(pl, "when", lambda test: lambda run: when(test)(by_name(run))),
        mock.patch.object(
            jax.lax,
            "while_loop",
            lambda test, run, start: while_loop(test, by_name(run), start),
        ),
    ):
        yield


def splash(
    q_NPH: jax.Array,
    k_NPH: jax.Array,
    v_NPH: jax.Array,
    segment_P: jax.Array,
    *,
    block_q: int,
    block_kv: int,
    block_kv_compute: int,
) -> jax.Array:
    """Splash attention with a full mask and segment ids; it scales nothing, so q comes scaled."""
    num_heads, num_rows, _ = q_NPH.shape
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.FullMask((num_rows, num_rows)) for _ in range(num_heads)]
    )
    blocks = splash_kernel.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv_compute
    )
    attend = splash_kernel.make_splash_mha_single_device(mask, block_sizes=blocks)
    segments = splash_kernel.SegmentIds(q=segment_P, kv=segment_P)
    return jnp.asarray(attend(q_NPH, k_NPH, v_NPH, segments))


def splash_counts(num_heads: int, num_rows: int, block_q: int, block_kv: int) -> dict[str, int]:
    """How often each block of `splash` runs: it visits every pair of blocks."""
    rows = num_heads * (num_rows // block_q)
    steps = rows * (num_rows // block_kv)
    return {"kernel": steps, "run": steps, "init": rows, "end": rows}


def flash(
    q_NPH: jax.Array,
    k_NPH: jax.Array,
    v_NPH: jax.Array,
    segment_P: jax.Array,
    *,
    block_q: int,
    block_k_major: int,
    block_k: int,
    scale: float,
) -> jax.Array:
    """Flash attention with segment ids."""
    blocks = flash_kernel.BlockSizes(
        block_q=block_q, block_k_major=block_k_major, block_k=block_k, block_b=1
    )
    segments = flash_kernel.SegmentIds(q=segment_P[None], kv=segment_P[None])
    return flash_kernel.flash_attention(
        q_NPH[None],
        k_NPH[None],
        v_NPH[None],
        segment_ids=segments,
        sm_scale=scale,
        block_sizes=blocks,
    )[0]


def flash_counts(num_heads: int, num_rows: int, block_q: int, block_k_major: int) -> dict[str, int]:
    """How often each block of `flash` runs: it visits every pair of blocks."""
    rows = num_heads * (num_rows // block_q)
    steps = rows * (num_rows // block_k_major)
    return {"kernel": steps, "run": steps, "start_new_sequence": rows, "store_output": rows}


def ragged(
    q_TNH: jax.Array,
    pages_LSCH: jax.Array,
    kv_lens_B: jax.Array,
    page_table_BM: jax.Array,
    q_starts_B: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    pages_per_block: int,
    queries_per_block: int,
    kv_scale: float | None = None,
) -> jax.Array:
    """Ragged paged attention; it does not write the new tokens' K and V.

    `kv_scale` is the step of quantised pages: it knows one for all heads, a constant.
    """
    return ragged_kernel.ragged_paged_attention(
        q_TNH,
        pages_LSCH,
        kv_lens_B,
        page_table_BM,
        q_starts_B,
        num_seqs,
        sm_scale=scale,
        k_scale=kv_scale,
        v_scale=kv_scale,
        num_kv_pages_per_block=pages_per_block,
        num_queries_per_block=queries_per_block,
        vmem_limit_bytes=VMEM_LIMIT_BYTES,
    )


def ragged_counts(
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    num_tokens: int,
    head_blocks: int,
    block_kv: int,
    block_q: int,
) -> dict[str, int]:
    """How often each block of `ragged` runs: all key blocks of a sequence per block of queries."""
    starts = np.concatenate([[0], np.cumsum(q_lens)])
    visits = blocks = 0
    for first in range(0, int(starts[-1]), block_q):
        for start, end, kv_len in zip(starts[:-1], starts[1:], kv_lens, strict=True):
            if start < first + block_q and end > first:
                visits += 1
                blocks += -(-kv_len // block_kv)
    steps = head_blocks * -(-num_tokens // block_q)
    return {
        "kernel": steps,
        "compute_with_cur_q_blk": head_blocks * visits,
        "compute_with_kv_blk_in_cur_seq": head_blocks * blocks,
        "prefetch_first_kv_blk": 1,
        "prefetch_next_kv_blk": head_blocks * blocks - 1,
    }


def _tower_rival(
    attend: Callable[..., jax.Array], num_rows: int, num_heads: int, width: int, dtype: str
) -> Call:
    lanes = round_up(width, NUM_LANES)

    def prepare(x_PNH: jax.Array) -> jax.Array:
        return jnp.pad(jnp.swapaxes(x_PNH, 0, 1), ((0, 0), (0, 0), (0, lanes - width)))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segment_P: jax.Array) -> jax.Array:
        # By default the products of float32 arrays are bfloat16's; ours are not.
        exact = "highest" if dtype == "float32" else None
        with named_blocks(), jax.default_matmul_precision(exact):
            out_NPH = attend(prepare(q), prepare(k), prepare(v), segment_P)
        return jnp.swapaxes(out_NPH, 0, 1)[..., :width]

    qkv = S((num_rows, num_heads, width), dtype)
    return Call(run, (qkv, qkv, qkv, S((num_rows,), jnp.int32)))


def splash_call(
    chip: Any, num_rows: int, num_heads: int, width: int, dtype: str, **blocks: int
) -> Call:
    """Splash attention; the scale is multiplied into the queries before."""
    del chip

    def attend(q: jax.Array, *others: jax.Array) -> jax.Array:
        return splash(q * width**-0.5, *others, **blocks)

    return _tower_rival(attend, num_rows, num_heads, width, dtype)


def flash_call(
    chip: Any, num_rows: int, num_heads: int, width: int, dtype: str, **blocks: int
) -> Call:
    """Flash attention."""
    del chip

    def attend(*arrays: jax.Array) -> jax.Array:
        return flash(*arrays, scale=width**-0.5, **blocks)

    return _tower_rival(attend, num_rows, num_heads, width, dtype)


def ragged_call(
    chip: Any,
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    width: int,
    page_size: int,
    num_pages: int,
    max_pages: int,
    dtype: str,
    cache_dtype: str,
    **blocks: int,
) -> Call:
    """Ragged paged attention; writing the new tokens' K and V is left out, in its favour."""
    del chip
    lanes = round_up(width, NUM_LANES)
    scales = {"scale": width**-0.5, "kv_scale": 0.03 if own.is_quantised(cache_dtype) else None}

    def run(q: jax.Array, cache: jax.Array, *addresses: jax.Array) -> jax.Array:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, lanes - width)))
        table_BM, starts_B, lens_B, live_1 = addresses
        with named_blocks():
            out = ragged(q, cache, lens_B, table_BM, starts_B, live_1, **scales, **blocks)
        return out[..., :width]

    shapes = (
        S((num_tokens, num_heads, width), dtype),
        S((num_pages, page_size, 2 * num_kv_heads, lanes), cache_dtype),
        S((num_seqs, max_pages), jnp.int32),
        S((num_seqs + 1,), jnp.int32),
        S((num_seqs,), jnp.int32),
        S((1,), jnp.int32),
    )
    return Call(run, shapes)
