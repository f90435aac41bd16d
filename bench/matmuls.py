"""Only the two matmuls of attention, as a Pallas kernel: the floor for a kernel with a softmax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bench.programs import Call
from tpu_vl.kernels.checks import NUM_LANES, round_up

FORMS = ("rows", "columns", "turned")
VMEM_LIMIT_BYTES = 64 << 20
_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))
_SUBLANES_BF16 = 16


def matmuls(
    q_NPH: jax.Array,
    k_NPH: jax.Array,
    v_NPH: jax.Array,
    *,
    width: int,
    form: str,
    block_q: int,
    block_kv: int,
    heads: int,
    unroll: int,
    interpret: bool = False,
) -> jax.Array:
    """The sum over keys of (q k) v, without scale, softmax or mask; K and V of a head in VMEM.

    Args:
        q_NPH: bfloat16 queries, H padded to lanes.
        k_NPH: the same of keys.
        v_NPH: the same of values.
        width: of a head, without the padding.
        form: what the matrix units hold and stream. "rows": scores [queries, keys], output rows.
            "columns": scores transposed, output rows. "turned": scores, values and output
            transposed, so that only `width` rows of values stream.
        block_q: queries of a grid step.
        block_kv: keys of an iteration.
        heads: of a grid step, scheduled together.
        unroll: iterations that are scheduled together.
        interpret: run on a CPU.
    """
    num_heads, num_rows, lanes = q_NPH.shape
    turned = form == "turned"
    rows = round_up(width, _SUBLANES_BF16)
    value_shape = (heads, rows, num_rows) if turned else (heads, num_rows, lanes)
    if turned:
        v_NPH = jnp.swapaxes(v_NPH, 1, 2)[:, :rows]
    q_block = pl.BlockSpec((heads, block_q, lanes), lambda n, i: (n, i, 0))
    out_block = pl.BlockSpec((heads, rows, block_q), lambda n, i: (n, 0, i))
    return pl.pallas_call(
        functools.partial(_kernel, form=form, block_kv=block_kv, unroll=unroll),
        name="matmuls",
        grid=(num_heads // heads, num_rows // block_q),
        in_specs=[
            q_block,
            pl.BlockSpec((heads, num_rows, lanes), lambda n, _: (n, 0, 0)),
            pl.BlockSpec(value_shape, lambda n, _: (n, 0, 0)),
        ],
        out_specs=out_block if turned else q_block,
        out_shape=jax.ShapeDtypeStruct(
            (num_heads, rows, num_rows) if turned else q_NPH.shape, q_NPH.dtype
        ),
        scratch_shapes=[
            pltpu.VMEM((heads, rows, block_q) if turned else (heads, block_q, lanes), jnp.float32)
        ],
        interpret=pltpu.InterpretParams() if interpret else False,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
    )(q_NPH, k_NPH, v_NPH)


def _kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, sum_ref: Any, *, form: str, **sizes: int
) -> None:
    block_kv, unroll = sizes["block_kv"], sizes["unroll"]
    dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)

    def scores(head: int, keys: Any) -> jax.Array:
        first, second = q_ref[head], k_ref[head, keys, :]
        if form != "rows":
            first, second = second, first
        return dot(first, second, _NT).astype(v_ref.dtype)

    def add(head: int, keys: Any, scores: jax.Array) -> None:
        if form == "turned":
            sum_ref[head] += dot(v_ref[head, :, keys], scores, _NN)
        else:
            sum_ref[head] += dot(scores, v_ref[head, keys, :], _NN if form == "rows" else _TN)

    with jax.named_scope("kernel"):
        sum_ref[...] = jnp.zeros_like(sum_ref)

        def blocks(i: jax.Array, carry: int) -> int:
            with jax.named_scope("blocks"):
                items = [
                    (head, pl.ds(pl.multiple_of((i * unroll + j) * block_kv, block_kv), block_kv))
                    for j in range(unroll)
                    for head in range(sum_ref.shape[0])
                ]
                ahead = scores(*items[0])
                for n, item in enumerate(items):
                    current = ahead
                    if n + 1 < len(items):
                        ahead = scores(*items[n + 1])
                    add(*item, current)
            return carry

        lax.fori_loop(0, k_ref.shape[1] // (block_kv * unroll), blocks, 0)
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def matmuls_counts(
    num_heads: int, num_rows: int, block_q: int, block_kv: int, heads: int, unroll: int
) -> dict[str, int]:
    """How often each block of `matmuls` runs."""
    steps = num_heads // heads * (num_rows // block_q)
    return {"kernel": steps, "blocks": steps * (num_rows // (block_kv * unroll))}


def matmuls_call(
    chip: Any, num_rows: int, num_heads: int, width: int, dtype: str, **blocks: Any
) -> Call:
    """Only the two matmuls."""
    del chip
    qkv = jax.ShapeDtypeStruct((num_heads, num_rows, round_up(width, NUM_LANES)), dtype)
    return Call(lambda *x: matmuls(*x, width=width, **blocks), (qkv, qkv, qkv))
