"""The vision tower of Qwen3-VL: patches in, rows of the media pool out, by layer range.

Dims: P patches, W patch vector, D width, N heads, H head width, F mlp, Y layers, C cells of the
position table, M merged cells, G = D * merge^2 (U the same, as an output), O width of the language
model, J = 1 + DeepStack levels: the vectors of a pool row, the merger's first.

Source: transformers 5.24 models/qwen3_vl/modeling_qwen3_vl.py, `Qwen3VLVisionModel`. Deviations:
pixels arrive as uint8 and are normalised here; position taps and coordinates arrive as data, since
the host computes them; layers are stacked and looped over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpu_vl import tree
from tpu_vl.errors import ConfigError
from tpu_vl.kernels.vision_attention.api import vision_attention
from tpu_vl.mesh import MODEL, model_size
from tpu_vl.models import ops
from tpu_vl.models.family import Backend, EncodeInputs, TensorMap
from tpu_vl.models.hf_config import Section
from tpu_vl.tree import pytree

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0
CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of the tower and the pixel statistics of the checkpoint's preprocessor.

    Args:
        depth: layers.
        width, num_heads, mlp_width: D, N, F.
        patch_size, temporal_patch_size, merge_size: geometry, in pixels, frames and patches.
        out_width: O.
        position_side: cells per side of the position table.
        tap_layers: layers after which a DeepStack level is taken, ascending.
        rope_theta: base wavelength of the rotary embedding.
        pixel_mean, pixel_std: per channel, of pixels scaled to [0, 1].
    """

    depth: int
    width: int
    num_heads: int
    mlp_width: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_width: int
    position_side: int
    tap_layers: tuple[int, ...]
    rope_theta: float
    pixel_mean: tuple[float, float, float]
    pixel_std: tuple[float, float, float]

    @property
    def head_dim(self) -> int:
        """H."""
        return self.width // self.num_heads

    @property
    def patch_width(self) -> int:
        """W."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def cells(self) -> int:
        """Patches of one merged cell."""
        return self.merge_size**2


@pytree
class Merger:
    """Norm and two-layer MLP from the patches of a cell to one vector of the language model."""

    norm_D: jax.Array
    norm_bias_D: jax.Array
    fc1_GU: jax.Array
    fc1_bias_U: jax.Array
    fc2_UO: jax.Array
    fc2_bias_O: jax.Array


@pytree
class DeepStackMerger:
    """The merger of one DeepStack level; its norm runs over the whole cell."""

    norm_G: jax.Array
    norm_bias_G: jax.Array
    fc1_GU: jax.Array
    fc1_bias_U: jax.Array
    fc2_UO: jax.Array
    fc2_bias_O: jax.Array


@pytree
class VisionLayers:
    """All layers, stacked."""

    norm1_YD: jax.Array
    norm1_bias_YD: jax.Array
    qkv_YD3NH: jax.Array
    qkv_bias_Y3NH: jax.Array
    proj_YNHD: jax.Array
    proj_bias_YD: jax.Array
    norm2_YD: jax.Array
    norm2_bias_YD: jax.Array
    fc1_YDF: jax.Array
    fc1_bias_YF: jax.Array
    fc2_YFD: jax.Array
    fc2_bias_YD: jax.Array


@pytree
class VisionParams:
    """The tower's weights; `deepstack` has one merger per level."""

    patch_WD: jax.Array
    patch_bias_D: jax.Array
    position_CD: jax.Array
    layers: VisionLayers
    merger: Merger
    deepstack: tuple[DeepStackMerger, ...]


def parse_vision_config(section: Section, preprocessor: Mapping[str, Any] | None) -> VisionConfig:
    """Reads `vision_config` of a config.json and the pixel statistics of its preprocessor.

    Args:
        section: the dict under `vision_config`.
        preprocessor: preprocessor_config.json, or None: mean and deviation 0.5.

    Raises:
        ConfigError: a key is missing or has a value that the tower does not compute.
    """
    section.must_be("hidden_act", "gelu_pytorch_tanh")
    section.must_be("in_channels", CHANNELS)
    rope = section.section("rope_parameters") if section.has("rope_parameters") else section
    rope.must_be("rope_type", "axial", "default")
    mean, std = _pixel_statistics(preprocessor)
    cfg = VisionConfig(
        depth=section.size("depth"),
        width=section.size("hidden_size"),
        num_heads=section.size("num_heads"),
        mlp_width=section.size("intermediate_size"),
        patch_size=section.size("patch_size"),
        temporal_patch_size=section.size("temporal_patch_size"),
        merge_size=section.size("spatial_merge_size"),
        out_width=section.size("out_hidden_size"),
        position_side=round(section.size("num_position_embeddings") ** 0.5),
        tap_layers=section.indices("deepstack_visual_indexes"),
        rope_theta=rope.number("rope_theta") if rope.has("rope_theta") else ROPE_THETA,
        pixel_mean=mean,
        pixel_std=std,
    )
    if cfg.width % cfg.num_heads or cfg.head_dim % 4:
        raise ConfigError(
            f"{section.name}: hidden_size {cfg.width} over num_heads {cfg.num_heads} must give a "
            "head width that is a multiple of 4 (rows and columns rotate pairs)"
        )
    if cfg.position_side**2 != section.size("num_position_embeddings"):
        raise ConfigError(
            f"{section.name}: num_position_embeddings {section.size('num_position_embeddings')} "
            "is not a square"
        )
    if list(cfg.tap_layers) != sorted({t for t in cfg.tap_layers if t < cfg.depth}):
        raise ConfigError(
            f"{section.name}: deepstack_visual_indexes {list(cfg.tap_layers)} must ascend and stay "
            f"below depth {cfg.depth}"
        )
    return cfg


def _pixel_statistics(
    preprocessor: Mapping[str, Any] | None,
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    section = Section(preprocessor or {}, "preprocessor_config.json")
    section.must_be("do_rescale", True)
    section.must_be("do_normalize", True)
    if section.has("rescale_factor") and abs(section.number("rescale_factor") * 255 - 1) > 1e-3:
        raise ConfigError(
            f"preprocessor_config.json: rescale_factor is {section.get('rescale_factor')!r}; only "
            "1/255 is supported"
        )
    return _triple(section, "image_mean"), _triple(section, "image_std")


def _triple(section: Section, key: str) -> tuple[float, float, float]:
    values = section.get(key) if section.has(key) else (0.5, 0.5, 0.5)
    if not isinstance(values, list | tuple) or len(values) != CHANNELS:
        raise ConfigError(f"{section.name}: {key} is {values!r}; three numbers are needed")
    red, green, blue = (float(v) for v in values)
    return red, green, blue


def vision_dims(cfg: VisionConfig) -> dict[str, int]:
    """The table of dims of the tower's arrays."""
    cell_width = cfg.width * cfg.cells
    return {
        "W": cfg.patch_width,
        "D": cfg.width,
        "N": cfg.num_heads,
        "H": cfg.head_dim,
        "F": cfg.mlp_width,
        "Y": cfg.depth,
        "C": cfg.position_side**2,
        "G": cell_width,
        "U": cell_width,
        "O": cfg.out_width,
    }


def abstract_vision_params(cfg: VisionConfig, dtype: str) -> VisionParams:
    """The tower's tree of jax.ShapeDtypeStruct."""
    dims = vision_dims(cfg)
    return tree.abstract(
        VisionParams,
        dims,
        dtype,
        layers=tree.abstract(VisionLayers, dims, dtype),
        merger=tree.abstract(Merger, dims, dtype),
        deepstack=tuple(tree.abstract(DeepStackMerger, dims, dtype) for _ in cfg.tap_layers),
    )


def vision_checkpoint_map(cfg: VisionConfig) -> tuple[TensorMap, ...]:
    """Where the tower's arrays are in a checkpoint."""
    kernel = (cfg.width, CHANNELS, cfg.temporal_patch_size, cfg.patch_size, cfg.patch_size)
    maps = [
        TensorMap(
            "vision.patch_WD", "model.visual.patch_embed.proj.weight", "DW", file_shape=kernel
        ),
        TensorMap("vision.patch_bias_D", "model.visual.patch_embed.proj.bias", "D"),
        TensorMap("vision.position_CD", "model.visual.pos_embed.weight", "CD"),
    ]
    layer = {
        "norm1_YD": ("norm1.weight", "D"),
        "norm1_bias_YD": ("norm1.bias", "D"),
        "qkv_YD3NH": ("attn.qkv.weight", "(3NH)D"),
        "qkv_bias_Y3NH": ("attn.qkv.bias", "(3NH)"),
        "proj_YNHD": ("attn.proj.weight", "D(NH)"),
        "proj_bias_YD": ("attn.proj.bias", "D"),
        "norm2_YD": ("norm2.weight", "D"),
        "norm2_bias_YD": ("norm2.bias", "D"),
        "fc1_YDF": ("mlp.linear_fc1.weight", "FD"),
        "fc1_bias_YF": ("mlp.linear_fc1.bias", "F"),
        "fc2_YFD": ("mlp.linear_fc2.weight", "DF"),
        "fc2_bias_YD": ("mlp.linear_fc2.bias", "D"),
    }
    for name, (key, layout) in layer.items():
        maps.append(
            TensorMap(f"vision.layers.{name}", f"model.visual.blocks.{{}}.{key}", layout, cfg.depth)
        )
    merger = {
        "norm_": ("norm.weight", "D"),
        "norm_bias_": ("norm.bias", "D"),
        "fc1_": ("linear_fc1.weight", "UG"),
        "fc1_bias_": ("linear_fc1.bias", "U"),
        "fc2_": ("linear_fc2.weight", "OU"),
        "fc2_bias_": ("linear_fc2.bias", "O"),
    }
    groups = [("vision.merger", "model.visual.merger", "D")]
    for level in range(len(cfg.tap_layers)):
        prefix = f"model.visual.deepstack_merger_list.{level}"
        groups.append((f"vision.deepstack.{level}", prefix, "G"))
    for path, prefix, normed in groups:
        for name, (key, layout) in merger.items():
            dims = layout.replace("D", normed)
            maps.append(TensorMap(f"{path}.{name}{dims[::-1]}", f"{prefix}.{key}", dims))
    return tuple(maps)


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
    first, last = inputs.layers_2[0], inputs.layers_2[1]
    num_blocks = (inputs.num_patches + backend.row_block - 1) // backend.row_block
    with ops.matmul_precision(hidden_PD.dtype):
        call = _Call(params, inputs, cfg, backend, num_blocks)
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
        call = _Call(params, inputs.replace(rows_M=rows_M), cfg, backend, num_blocks)  # pyright: ignore[reportAttributeAccessIssue]
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
        num_blocks: Any,
    ) -> None:
        self.params = params
        self.inputs = inputs
        self.cfg = cfg
        self.backend = backend
        self.num_blocks = num_blocks
        self.block = backend.row_block
        inv_freq = ops.inverse_frequencies(cfg.head_dim // 2, cfg.rope_theta)
        self.cos_PH, self.sin_PH = ops.vision_rope_tables(inputs.coords_2P, inv_freq)

    def embed(self) -> jax.Array:
        """Patch and position embedding, each device its share of the patches."""
        with jax.named_scope("patch_embed"):
            p, inputs, cfg = self.params, self.inputs, self.cfg
            repeat = cfg.patch_width // CHANNELS
            mean_W = np.repeat(np.asarray(cfg.pixel_mean, np.float32), repeat)
            std_W = np.repeat(np.asarray(cfg.pixel_std, np.float32), repeat)
            patches = self._constrain(inputs.patches_PW, MODEL, None)
            pixels_PW = (patches.astype(jnp.float32) / np.float32(255.0) - mean_W) / std_W
            hidden = jnp.einsum("pw,wd->pd", pixels_PW.astype(p.patch_WD.dtype), p.patch_WD)
            hidden = hidden + p.patch_bias_D
            index_4P = self._constrain(inputs.interp_index_4P, None, MODEL)
            weight_4P = self._constrain(inputs.interp_weight_4P, None, MODEL)
            position = sum(
                p.position_CD[index_4P[tap]].astype(jnp.float32) * weight_4P[tap][:, None]
                for tap in range(4)
            )
            return self._constrain(hidden + jnp.asarray(position, hidden.dtype), None, None)

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

            def project(i: Any, qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                x = ops.layer_norm(self._rows(hidden, i), p.norm1_YD, p.norm1_bias_YD, NORM_EPS)
                x = jnp.einsum("pd,dsnh->spnh", x, p.qkv_YD3NH) + p.qkv_bias_Y3NH[:, None]
                cos, sin = self._rows(self.cos_PH, i), self._rows(self.sin_PH, i)
                new = ops.rotate(x[0], cos, sin), ops.rotate(x[1], cos, sin), x[2]
                return tuple(self._put(old, n, i) for old, n in zip(qkv, new, strict=True))

            q, k, v = jax.lax.fori_loop(0, self.num_blocks, project, (q, k, v))
        with jax.named_scope("attention"):
            attended = vision_attention(
                self._heads(q),
                self._heads(k),
                self._heads(v),
                self.inputs.bounds_2P,
                self.inputs.num_patches,
                scale=self.cfg.head_dim**-0.5,
                implementation=self.backend.vision_attention,
                mesh=self.backend.mesh,
            )
        with jax.named_scope("mlp"):

            def combine(i: Any, hidden: jax.Array) -> jax.Array:
                x = jnp.einsum("pnh,nhd->pd", self._rows(attended, i), p.proj_YNHD)
                rows = self._rows(hidden, i) + (x + p.proj_bias_YD)
                x = ops.layer_norm(rows, p.norm2_YD, p.norm2_bias_YD, NORM_EPS)
                x = ops.gelu_tanh(jnp.einsum("pd,df->pf", x, p.fc1_YDF) + p.fc1_bias_YF)
                x = jnp.einsum("pf,fd->pd", x, p.fc2_YFD) + p.fc2_bias_YD
                return self._put(hidden, rows + x, i)

            hidden = jax.lax.fori_loop(0, self.num_blocks, combine, hidden)
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
        # A negative index would wrap; one past the end is dropped.
        rows_M = jnp.where(self.inputs.rows_M < 0, pool.shape[0], self.inputs.rows_M)
        size = self.block // self.cfg.cells

        def write(i: Any, pool: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(rows_M, i * size, size)
            merged = merge(self._rows(hidden, i)).astype(pool.dtype)
            return pool.at[rows, column].set(merged, mode="drop")

        return jax.lax.fori_loop(0, num_blocks, write, pool)

    def _rows(self, array: jax.Array, i: Any) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, i * self.block, self.block)

    def _put(self, array: jax.Array, rows: jax.Array, i: Any) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(array, rows, i * self.block, 0)

    def _heads(self, x_PNH: jax.Array) -> jax.Array:
        fits = self.cfg.num_heads % model_size(self.backend.mesh) == 0
        return self._constrain(x_PNH, None, MODEL if fits else None, None)

    def _constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        sharding = NamedSharding(self.backend.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(x, sharding)


def _merger_mlp(x_MG: jax.Array, p: Merger | DeepStackMerger) -> jax.Array:
    x_MU = ops.gelu(jnp.einsum("mg,gu->mu", x_MG, p.fc1_GU) + p.fc1_bias_U)
    return jnp.einsum("mu,uo->mo", x_MU, p.fc2_UO) + p.fc2_bias_O
