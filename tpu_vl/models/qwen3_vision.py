"""The vision tower of Qwen3-VL: patches in, rows of the media pool out, by layer range.

Dims: P patches, W patch vector, D width, N heads, H head width, F mlp, Y layers, C cells of the
position table, M merged cells, G = D * merge^2 (U the same, as an output), O width of the language
model, J = 1 + DeepStack levels: the vectors of a pool row, the merger's first, X bins.

Source: transformers 5.24 models/qwen3_vl/modeling_qwen3_vl.py, `Qwen3VLVisionModel`. Deviations:
pixels arrive as uint8 and are normalised here; position taps and coordinates arrive as data, since
the host computes them; layers are stacked and looped over.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_vl.kernels import sharding
from tpu_vl.kernels.vision_attention.api import vision_attention
from tpu_vl.mesh import MODEL
from tpu_vl.models import ops
from tpu_vl.models.family import Backend, EncodeInputs
from tpu_vl.models.qwen3_vision_config import (
    CHANNELS,
    DeepStackMerger,
    Merger,
    VisionConfig,
    VisionParams,
)

NORM_EPS = 1e-6


def encode_step(
    params: VisionParams,
    pool_RJD: jax.Array,
    hidden_PD: jax.Array,
    inputs: EncodeInputs,
    *,
    cfg: VisionConfig,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Runs the layers `inputs.layers_2` of one packed call and writes the rows they finish.

    Args:
        params: the tower.
        pool_RJD: media pool; column 0 takes the merger's vectors, column 1 + level the taps.
        hidden_PD: what the slice before gave; ignored when the first layer is 0.
        inputs: the call, see `family.EncodeInputs`.
        cfg, backend: static.

    Returns:
        The pool and the hidden rows for the next slice.
    """
    with ops.matmul_precision(hidden_PD.dtype):
        if cfg.num_bins == 1:
            return _encode(params, pool_RJD, hidden_PD, inputs, cfg, backend, backend.mesh)
        return _encode_bins(params, pool_RJD, hidden_PD, inputs, cfg, backend)


def _encode(
    params: VisionParams,
    pool_RJD: jax.Array,
    hidden_PD: jax.Array,
    inputs: EncodeInputs,
    cfg: VisionConfig,
    backend: Backend,
    mesh: Mesh | None,
) -> tuple[jax.Array, jax.Array]:
    """One bin, by all devices of `mesh`; None: by the device that this is traced for."""
    first, last = inputs.layers_2[0], inputs.layers_2[1]
    num_blocks = (inputs.num_patches_X[0] + backend.row_block - 1) // backend.row_block
    call = _Call(params, inputs, cfg, backend, mesh, num_blocks)
    hidden_PD = jax.lax.cond(first == 0, call.embed, lambda: hidden_PD)

    def layer(y: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pool, *rows = carry
        rows = call.layer(y, *rows)
        for level, tapped in enumerate(cfg.tap_layers):
            # No tap is a loop of no trips: a conditional could copy the pool.
            pool = call.tap(pool, rows[0], level, jnp.where(y == tapped, num_blocks, 0))
        return pool, *rows

    carry = (pool_RJD, hidden_PD, *call.buffers())
    pool_RJD, hidden_PD, *_ = jax.lax.fori_loop(first, last, layer, carry)
    finished = jnp.where(last == cfg.depth, num_blocks, 0)
    return call.finish(pool_RJD, hidden_PD, finished), hidden_PD


def _encode_bins(
    params: VisionParams,
    pool_RJD: jax.Array,
    hidden_PD: jax.Array,
    inputs: EncodeInputs,
    cfg: VisionConfig,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Every device its own bin into rows of its own; then the columns that this slice finished."""
    num_rows = inputs.rows_M.size // cfg.num_bins
    # Every device has the metadata of all bins: unsaid, it would be spread and gathered again.
    whole = NamedSharding(backend.mesh, PartitionSpec())
    known: Any = jax.lax.with_sharding_constraint(replace(inputs, patches_PW=None), whole)  # pyright: ignore[reportArgumentType]
    inputs = replace(known, patches_PW=inputs.patches_PW)

    def own_bin(
        params: VisionParams, hidden_PD: jax.Array, inputs: EncodeInputs
    ) -> tuple[jax.Array, jax.Array]:
        rows_MJD = jnp.zeros((num_rows, *pool_RJD.shape[1:]), pool_RJD.dtype)
        in_order = replace(inputs, rows_M=jnp.arange(num_rows, dtype=jnp.int32))
        return _encode(params, rows_MJD, hidden_PD, in_order, cfg, backend, None)

    first_dim, second_dim = PartitionSpec(MODEL), PartitionSpec(None, MODEL)
    spec_of: dict[str, Any] = {
        "patches_PW": first_dim,
        "coords_2P": second_dim,
        "interp_index_4P": second_dim,
        "interp_weight_4P": second_dim,
        "bounds_2P": second_dim,
        "rows_M": first_dim,
        "num_patches_X": first_dim,
        "layers_2": PartitionSpec(),
    }
    in_specs: Any = (PartitionSpec(), first_dim, EncodeInputs(**spec_of))
    run = sharding.on_mesh(own_bin, backend.mesh, in_specs, (first_dim, first_dim))
    rows_MJD, hidden_PD = run(params, hidden_PD, inputs)
    return _gather_rows(pool_RJD, rows_MJD, inputs, cfg, backend), hidden_PD


def _gather_rows(
    pool_RJD: jax.Array,
    rows_MJD: jax.Array,
    inputs: EncodeInputs,
    cfg: VisionConfig,
    backend: Backend,
) -> jax.Array:
    """Writes finished columns of all bins into the pool, block by block of the fullest bin."""
    first, last = inputs.layers_2[0], inputs.layers_2[1]
    size, width = backend.row_block // cfg.cells, pool_RJD.shape[2]
    num_blocks = (jnp.max(inputs.num_patches_X) + backend.row_block - 1) // backend.row_block
    rows_XMJD = rows_MJD.reshape(cfg.num_bins, -1, *pool_RJD.shape[1:])
    place_XM = _or_nowhere(inputs.rows_M, pool_RJD).reshape(cfg.num_bins, -1)
    by_bin = NamedSharding(backend.mesh, PartitionSpec(MODEL))
    by_width = NamedSharding(
        backend.mesh, PartitionSpec(None, sharding.heads_axis(width, backend.mesh))
    )

    def write(column: int, i: jax.Array, pool: jax.Array) -> jax.Array:
        at = (0, i * size, column, 0)
        new = jax.lax.dynamic_slice(rows_XMJD, at, (cfg.num_bins, size, 1, width))
        # Said twice, or the whole array would cross instead of one block.
        new = jax.lax.with_sharding_constraint(new, by_bin).reshape(-1, width)
        new = jax.lax.with_sharding_constraint(new, by_width)
        place = jax.lax.dynamic_slice_in_dim(place_XM, i * size, size, axis=1)
        return pool.at[place.reshape(-1), column].set(new, mode="drop")

    with jax.named_scope("gather_rows"):
        finished = [last == cfg.depth, *((first <= y) & (y < last) for y in cfg.tap_layers)]
        for column, done in enumerate(finished):
            trips = jnp.where(done, num_blocks, 0)
            pool_RJD = jax.lax.fori_loop(0, trips, partial(write, column), pool_RJD)
    return pool_RJD


def _or_nowhere(rows_M: jax.Array, pool_RJD: jax.Array) -> jax.Array:
    """Rows with one past the pool's end, which is dropped, for -1, which would wrap."""
    return jnp.where(rows_M < 0, pool_RJD.shape[0], rows_M)


def tower(
    params: VisionParams, inputs: EncodeInputs, *, cfg: VisionConfig, backend: Backend
) -> jax.Array:
    """The whole tower with static trip counts: reverse-differentiable, for training.

    Args:
        params: the tower.
        inputs: as for `encode_step`; `rows_M` and `layers_2` are not read.
        cfg, backend: static; `backend.vision_attention` must be differentiable ("dense").

    Returns:
        pool_MJD: for each merged cell in order, the merger's vector, then the DeepStack levels.
    """
    num_patches = inputs.patches_PW.shape[0]
    rows_M = jnp.arange(num_patches // cfg.cells, dtype=jnp.int32)
    dtype = params.patch_WD.dtype
    pool = jnp.zeros((rows_M.size, 1 + len(cfg.tap_layers), cfg.out_width), dtype)
    num_blocks = num_patches // backend.row_block
    with ops.matmul_precision(dtype):
        inputs = replace(inputs, rows_M=rows_M)
        call = _Call(params, inputs, cfg, backend, backend.mesh, num_blocks)
        rows = [call.embed(), *call.buffers()]
        for y in range(cfg.depth):
            rows = call.layer(y, *rows)
            if y in cfg.tap_layers:
                pool = call.tap(pool, rows[0], cfg.tap_layers.index(y), num_blocks)
        return call.finish(pool, rows[0], num_blocks)


class _Call:
    """The parts of one tower call; trip counts may be data (serving) or static (training)."""

    def __init__(
        self,
        params: VisionParams,
        inputs: EncodeInputs,
        cfg: VisionConfig,
        backend: Backend,
        mesh: Mesh | None,
        num_blocks: Any,
    ) -> None:
        self.params = params
        self.inputs = inputs
        self.cfg = cfg
        self.backend = backend
        self.mesh = mesh
        self.num_blocks = num_blocks
        self.block = backend.row_block
        inv_freq = ops.inverse_frequencies(cfg.head_dim // 2, cfg.rope_theta)
        self.cos_PH, self.sin_PH = ops.vision_rope_tables(inputs.coords_2P, inv_freq)

    def embed(self) -> jax.Array:
        """Patch and position embedding, each device its share of the patches."""
        p, inputs = self.params, self.inputs
        weights = (p.patch_WD, p.patch_bias_D, p.position_CD)
        arrays = (inputs.patches_PW, inputs.interp_index_4P, inputs.interp_weight_4P)
        with jax.named_scope("patch_embed"):
            if self.mesh is None or self.mesh.size == 1:
                return self._embedded(weights, arrays, self.num_blocks, self.block)
            num_local = inputs.patches_PW.shape[0] // self.mesh.size
            block = math.gcd(num_local, self.block)

            def own_share(
                weights: tuple[jax.Array, ...], used: jax.Array, *arrays: jax.Array
            ) -> jax.Array:
                used = jnp.clip(used - jax.lax.axis_index(MODEL) * num_local, 0, num_local)
                return self._embedded(weights, arrays, (used + block - 1) // block, block)

            whole, by_patch = PartitionSpec(), PartitionSpec(None, MODEL)
            specs = (whole, whole, PartitionSpec(MODEL), by_patch, by_patch)
            run = sharding.on_mesh(own_share, self.mesh, specs, PartitionSpec(MODEL))
            hidden = run(weights, inputs.num_patches_X[0], *arrays)
            return self._constrain(hidden, None, None)

    def _embedded(
        self,
        weights: tuple[jax.Array, ...],
        arrays: tuple[jax.Array, ...],
        num_blocks: Any,
        block: int,
    ) -> jax.Array:
        patch_WD, patch_bias_D, position_CD = weights
        patches_PW, index_4P, weight_4P = arrays
        repeat = self.cfg.patch_width // CHANNELS
        mean_W = np.repeat(np.asarray(self.cfg.pixel_mean, np.float32), repeat)
        std_W = np.repeat(np.asarray(self.cfg.pixel_std, np.float32), repeat)

        def embed_block(i: Any, hidden: jax.Array) -> jax.Array:
            def of(array: jax.Array, axis: int = 0) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(array, i * block, block, axis)

            pixels = (of(patches_PW).astype(jnp.float32) / np.float32(255.0) - mean_W) / std_W
            rows = jnp.einsum("pw,wd->pd", pixels.astype(patch_WD.dtype), patch_WD) + patch_bias_D
            index_4B, weight_4B = of(index_4P, 1), of(weight_4P, 1)
            position = sum(
                position_CD[index_4B[tap]].astype(jnp.float32) * weight_4B[tap][:, None]
                for tap in range(4)
            )
            rows = rows + jnp.asarray(position, rows.dtype)
            return jax.lax.dynamic_update_slice_in_dim(hidden, rows, i * block, 0)

        hidden = jnp.zeros((patches_PW.shape[0], self.cfg.width), patch_WD.dtype)
        return jax.lax.fori_loop(0, num_blocks, embed_block, hidden)

    def buffers(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of all patches; every layer fills them again."""
        shape = (self.inputs.patches_PW.shape[0], self.cfg.num_heads, self.cfg.head_dim)
        zeros = self._heads(jnp.zeros(shape, self.params.patch_WD.dtype))
        return zeros, zeros, zeros

    def layer(self, y: Any, hidden: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        """One layer; returns the new hidden rows and the used buffers."""
        p = jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, y, keepdims=False), self.params.layers
        )
        with jax.named_scope("qkv"):

            def project(hidden: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, ...]:
                x = ops.layer_norm(hidden, p.norm1_YD, p.norm1_bias_YD, NORM_EPS)
                x = jnp.einsum("pd,dsnh->spnh", x, p.qkv_YD3NH) + p.qkv_bias_Y3NH[:, None]
                return ops.rotate(x[0], cos, sin), ops.rotate(x[1], cos, sin), x[2]

            def put_qkv(i: Any, qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                new = self._block_of(project, i, hidden, self.cos_PH, self.sin_PH)
                return tuple(self._put(old, n, i) for old, n in zip(qkv, new, strict=True))

            q, k, v = jax.lax.fori_loop(0, self.num_blocks, put_qkv, (q, k, v))
        with jax.named_scope("attention"):
            attended = vision_attention(
                self._heads(q),
                self._heads(k),
                self._heads(v),
                self.inputs.bounds_2P,
                self.inputs.num_patches_X[0],
                scale=self.cfg.head_dim**-0.5,
                implementation=self.backend.vision_attention,
                mesh=self.mesh,
            )
        with jax.named_scope("mlp"):

            def combine(hidden: jax.Array, attended: jax.Array) -> jax.Array:
                x = jnp.einsum("pnh,nhd->pd", attended, p.proj_YNHD)
                rows = hidden + (x + p.proj_bias_YD)
                x = ops.layer_norm(rows, p.norm2_YD, p.norm2_bias_YD, NORM_EPS)
                x = ops.gelu_tanh(jnp.einsum("pd,df->pf", x, p.fc1_YDF) + p.fc1_bias_YF)
                return rows + (jnp.einsum("pf,fd->pd", x, p.fc2_YFD) + p.fc2_bias_YD)

            def put_hidden(i: Any, hidden: jax.Array) -> jax.Array:
                return self._put(hidden, self._block_of(combine, i, hidden, attended), i)

            hidden = jax.lax.fori_loop(0, self.num_blocks, put_hidden, hidden)
        return self._constrain(hidden, None, None), q, k, v

    def tap(self, pool: jax.Array, hidden: jax.Array, level: int, num_blocks: Any) -> jax.Array:
        """Writes one DeepStack level of all rows; nothing when `num_blocks` is 0."""
        p = self.params.deepstack[level]

        def merge(rows_PD: jax.Array) -> jax.Array:
            x = rows_PD.reshape(-1, self.cfg.width * self.cfg.cells)
            x = ops.layer_norm(x, p.norm_G, p.norm_bias_G, NORM_EPS)
            return _merger_mlp(x, p)

        with jax.named_scope("deepstack"):
            return self._write(pool, hidden, merge, 1 + level, num_blocks)

    def finish(self, pool: jax.Array, hidden: jax.Array, num_blocks: Any) -> jax.Array:
        """Writes the merger's vector of all rows; nothing when `num_blocks` is 0."""
        p = self.params.merger

        def merge(rows_PD: jax.Array) -> jax.Array:
            x = ops.layer_norm(rows_PD, p.norm_D, p.norm_bias_D, NORM_EPS)
            x = x.reshape(-1, self.cfg.width * self.cfg.cells)
            return _merger_mlp(x, p)

        with jax.named_scope("merger"):
            return self._write(pool, hidden, merge, 0, num_blocks)

    def _write(
        self, pool: jax.Array, hidden: jax.Array, merge: Any, column: Any, num_blocks: Any
    ) -> jax.Array:
        rows_M = _or_nowhere(self.inputs.rows_M, pool)
        size = self.block // self.cfg.cells

        def write(i: Any, pool: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(rows_M, i * size, size)
            merged = self._block_of(merge, i, hidden).astype(pool.dtype)
            return pool.at[rows, column].set(merged, mode="drop")

        return jax.lax.fori_loop(0, num_blocks, write, pool)

    def _block_of(self, function: Callable[..., Any], i: Any, *arrays: jax.Array) -> Any:
        """`function` of block i of some arrays; in the last block, of no more rows than needed.

        It maps leading rows to leading rows, in proportion. Rows that are not computed are zero.
        """
        blocks = [jax.lax.dynamic_slice_in_dim(a, i * self.block, self.block) for a in arrays]
        num_steps = self.backend.row_steps
        if num_steps == 1 or isinstance(self.num_blocks, int):
            return function(*blocks)

        def of_size(size: int, *blocks: jax.Array) -> Any:
            def fill(out: jax.Array) -> jax.Array:
                missing = out.shape[0] * self.block // size - out.shape[0]
                return jnp.pad(out, ((0, missing), *((0, 0),) * (out.ndim - 1)))

            return jax.tree.map(fill, function(*(b[:size] for b in blocks)))

        step = self.block // num_steps
        steps_left = (self.inputs.num_patches_X[0] - i * self.block + step - 1) // step
        sizes = [partial(of_size, step * n) for n in range(1, num_steps + 1)]
        return jax.lax.switch(jnp.clip(steps_left, 1, num_steps) - 1, sizes, *blocks)

    def _put(self, array: jax.Array, rows: jax.Array, i: Any) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(array, rows, i * self.block, 0)

    def _heads(self, x_PNH: jax.Array) -> jax.Array:
        return self._constrain(
            x_PNH, None, sharding.heads_axis(self.cfg.num_heads, self.mesh), None
        )

    def _constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        if self.mesh is None:
            return x
        placed = NamedSharding(self.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(x, placed)


def _merger_mlp(x_MG: jax.Array, p: Merger | DeepStackMerger) -> jax.Array:
    x_MU = ops.gelu(jnp.einsum("mg,gu->mu", x_MG, p.fc1_GU) + p.fc1_bias_U)
    return jnp.einsum("mu,uo->mo", x_MU, p.fc2_UO) + p.fc2_bias_O
