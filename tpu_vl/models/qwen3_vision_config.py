"""The sizes of Qwen3-VL's vision tower, its params and where they are in a checkpoint.

Dims: W patch vector, D width, N heads, H head width, F mlp, Y layers, C cells of the position
table, G = D * merge^2 (U the same, as an output), O width of the language model.

On several devices a tower runs in one of two modes. "weights": heads and MLPs are over "model" and
all devices share every frame. "data": every device has the whole tower and a bin of whole frames
of its own; inside the tower nothing crosses devices, only finished rows go to the pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from tpu_vl import tree
from tpu_vl.errors import ConfigError
from tpu_vl.kernels.checks import round_up
from tpu_vl.models import tensor_parallel
from tpu_vl.models.family import TensorMap
from tpu_vl.models.hf_config import Section
from tpu_vl.tree import pytree

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
        num_shards: devices that heads and MLPs are spread over; 1 in data mode. The sizes above
            are the checkpoint's, those of `vision_dims` are what the tree holds.
        num_bins: devices that encode whole frames of their own; 1 in weights mode.
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
    num_shards: int = 1
    num_bins: int = 1

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


def shard(cfg: VisionConfig, num_shards: int, tower_mode: str) -> VisionConfig:
    """The config with the sizes that the tree holds on `num_shards` devices.

    Args:
        cfg: as parsed.
        num_shards: devices on the "model" axis.
        tower_mode: "weights" or "data".

    Raises:
        ConfigError: heads that do not divide in weights mode.
    """
    if tower_mode == "data":
        return replace(cfg, num_bins=num_shards)
    if cfg.num_heads % num_shards:
        raise ConfigError(
            f"the {cfg.num_heads} heads of the vision tower cannot be spread over {num_shards} "
            "devices; use --mm-encoder-tp-mode data"
        )
    return replace(cfg, num_shards=num_shards)


def vision_dims(cfg: VisionConfig) -> dict[str, int]:
    """The table of dims of the tower's arrays as the tree holds them, F and U padded."""
    cell_width = cfg.width * cfg.cells
    return {
        "W": cfg.patch_width,
        "D": cfg.width,
        "N": cfg.num_heads,
        "H": cfg.head_dim,
        "F": round_up(cfg.mlp_width, cfg.num_shards),
        "Y": cfg.depth,
        "C": cfg.position_side**2,
        "G": cell_width,
        "U": round_up(cell_width, cfg.num_shards),
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
    in_file = vision_dims(replace(cfg, num_shards=1))
    return tensor_parallel.as_held(maps, in_file, vision_dims(cfg))
