"""Strided access to rows that share 32-bit words, the unit that a TPU addresses in VMEM.

A buffer [X, C, 128] of a packed dtype holds 4 // itemsize neighbouring rows of C in one word: a
bfloat16 cache row pair (k, v) of a head, or two pairs of an 8-bit one. Column i of the words is
read or written for all X at once by a strided access, which costs one instruction per register;
taking rows out of packed values costs twenty.

JAX's interpreter cannot view a reference in another dtype. There the same words are taken out of
the buffer's value: `pltpu.bitcast` of a value and of a reference agree by definition.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.checks import NUM_LANES


def packing(dtype: Any) -> int:
    """Rows of a dtype in one 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def _columns(ref_XCL: Any) -> int:
    return ref_XCL.shape[1] // packing(ref_XCL.dtype)


def _flat(ref_XCL: Any) -> Any:
    """The reference as rows of words [X * columns, 128]."""
    if packing(ref_XCL.dtype) > 1:
        ref_XCL = ref_XCL.bitcast(jnp.uint32)
    return ref_XCL.reshape(ref_XCL.shape[0] * ref_XCL.shape[1], NUM_LANES)


def load(ref_XCL: Any, column: Any, *, interpreted: bool) -> jax.Array:
    """Words [X, 128] of one column: uint32, or the dtype itself if it is 32 bits wide.

    Args:
        ref_XCL: buffer; C is a multiple of the packing.
        column: int or int32 scalar in [0, C / packing).
        interpreted: static; takes the words out of the value.
    """
    size, num_columns = ref_XCL.shape[0], _columns(ref_XCL)
    if not interpreted:
        return _flat(ref_XCL)[pl.ds(column, size, stride=num_columns), :]
    return lax.dynamic_index_in_dim(_value(ref_XCL), column, axis=1, keepdims=False)


def store(ref_XCL: Any, column: Any, words_XL: jax.Array, *, interpreted: bool) -> None:
    """Writes one column of words; the inverse of `load`."""
    size, num_columns = ref_XCL.shape[0], _columns(ref_XCL)
    if not interpreted:
        _flat(ref_XCL)[pl.ds(column, size, stride=num_columns), :] = words_XL
        return
    words = lax.dynamic_update_index_in_dim(_value(ref_XCL), words_XL, column, axis=1)
    flat = words.reshape(-1, NUM_LANES)
    if packing(ref_XCL.dtype) > 1:
        flat = pltpu.bitcast(flat, ref_XCL.dtype)
    ref_XCL[...] = flat.reshape(ref_XCL.shape)


def _value(ref_XCL: Any) -> jax.Array:
    """The buffer's words [X, columns, 128] as a value."""
    flat = ref_XCL[...].reshape(-1, NUM_LANES)
    if packing(ref_XCL.dtype) > 1:
        flat = pltpu.bitcast(flat, jnp.uint32)
    return flat.reshape(ref_XCL.shape[0], -1, NUM_LANES)


def unpack(words_XL: jax.Array, row: int, dtype: Any, out_dtype: Any) -> jax.Array:
    """Row `row` of each word, a value of `dtype`, as `out_dtype`.

    Args:
        words_XL: of `load`.
        row: static, in [0, packing).
        dtype: of the buffer: float32, bfloat16, int8 or an 8-bit float.
        out_dtype: float32 or bfloat16.
    """
    if packing(dtype) == 1:
        return words_XL.astype(out_dtype)
    if dtype == jnp.bfloat16:
        high = words_XL & jnp.uint32(0xFFFF0000) if row else words_XL << 16
        return pltpu.bitcast(high, jnp.float32).astype(out_dtype)
    if dtype == jnp.int8:
        signed = pltpu.bitcast(words_XL << (24 - 8 * row), jnp.int32) >> 24
        return signed.astype(jnp.float32).astype(out_dtype)
    byte_XL = (words_XL >> (8 * row)).astype(jnp.uint8)
    return pltpu.bitcast(byte_XL, dtype).astype(out_dtype)


def pack(rows: Sequence[jax.Array], dtype: Any, *, interpreted: bool) -> jax.Array:
    """Words [X, 128] whose rows are given as float32 values; the inverse of `unpack`.

    Args:
        rows: one [X, 128] for each row of a word.
        dtype: float32 or bfloat16, to which they are rounded.
        interpreted: static; JAX's interpreter does not know the TPU's operation.
    """
    if packing(dtype) == 1:
        return rows[0].astype(dtype)
    if not interpreted:
        return pltpu.pack_elementwise(rows, packed_dtype=dtype)
    low, high = (lax.bitcast_convert_type(r.astype(dtype), jnp.uint16) for r in rows)
    return low.astype(jnp.uint32) | (high.astype(jnp.uint32) << 16)


def pack_rows(rows: jax.Array) -> jax.Array:
    """Words [X, 128] of neighbouring rows [X * packing, 128]."""
    return rows if packing(rows.dtype) == 1 else pltpu.bitcast(rows, jnp.uint32)


def split_rows(words_XL: jax.Array, dtype: Any) -> jax.Array:
    """Neighbouring rows [X * packing, 128] of words [X, 128]; the inverse of `pack_rows`."""
    return words_XL if packing(dtype) == 1 else pltpu.bitcast(words_XL, dtype)
