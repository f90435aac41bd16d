"""The record that a model family exports: all that the rest of the project knows of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from tpu_vl import tree
from tpu_vl.errors import ConfigError
from tpu_vl.tree import pytree


@dataclass(frozen=True)
class Backend:
    """Which implementation of each op a program is traced with (static, hashable).

    Args:
        mesh: axes ("data", "model").
        vision_attention: name accepted by `tpu_vl.kernels.vision_attention.api`.
        paged_attention: name accepted by `tpu_vl.kernels.paged_attention.api`.
        row_block: patches per block of the tower's linear parts; capacities are multiples of it.
        row_steps: sizes that a call's last block may take, in even steps up to `row_block`.
    """

    mesh: Mesh
    vision_attention: str
    paged_attention: str
    row_block: int
    row_steps: int = 1


@dataclass(frozen=True)
class PagedCache:
    """A declared cache that grows by pages: one array per layer, `[page, slot, C, H]`.

    Args:
        name: e.g. "kv".
        num_layers: arrays of it.
        num_kv_heads: K as held, copies included; C is 2K, K and V of a head interleaved, padded
            to the packing.
        head_dim: H.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class VisionGeometry:
    """What the host needs to know of the tower to make patches, positions and rows.

    Args:
        patch_size: pixels per side of a patch.
        temporal_patch_size: frames per temporal group.
        merge_size: patches per side of a merged cell (one pool row, one token).
        patch_width: W, values per patch: 3 * temporal_patch_size * patch_size ** 2.
        position_side: cells per side of the learned position table.
        depth: tower layers.
        width: tower hidden width.
        num_levels: DeepStack levels; a pool row holds 1 + num_levels vectors.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id: ids.
        num_bins: X, bins of a call, each of capacity / X patches: one per device where devices
            encode whole frames of their own, 1 where all devices share every frame.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    patch_width: int
    position_side: int
    depth: int
    width: int
    num_levels: int
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    num_bins: int = 1


@pytree
class EncodeInputs:
    """One packed call of the tower: X bins of P / X patches, whole frames, each bin's padding last.

    Args:
        patches_PW: uint8 RGB values, channel, time, row, column inside a patch.
        coords_2P: int32 row and column of each patch in its frame, in patches.
        interp_index_4P: int32 cells of the position table, in [0, side ** 2).
        interp_weight_4P: float32 their weights.
        bounds_2P: int32 first patch and one past the last of each patch's own segment (frame),
            counted inside its bin. A bin's padding is one segment of its own, last.
        rows_M: int32 pool row of each merged cell, M = P / merge ** 2; -1 writes nothing.
        num_patches_X: int32 valid patches of each bin; those behind are padding.
        layers_2: int32 first layer to run and one past the last; 0 embeds the patches first,
            the depth writes the pool rows of the merger.
    """

    patches_PW: jax.Array
    coords_2P: jax.Array
    interp_index_4P: jax.Array
    interp_weight_4P: jax.Array
    bounds_2P: jax.Array
    rows_M: jax.Array
    num_patches_X: jax.Array
    layers_2: jax.Array


@pytree
class TextInputs:
    """One ragged batch of T tokens in B sequences, padding last in both.

    Args:
        ids_T: int32 token ids.
        positions_XT: int32, X = 3 (time, row, column) or 1 in a text-only process.
        pool_row_T: int32 media pool row of each token, -1 for text; None in a text-only process.
        page_table_BL: int32 pages of each sequence, in order.
        q_starts_B: int32 [B + 1] cumulative new tokens; sequences past the last repeat the total.
        kv_lens_B: int32 tokens in the cache including the new ones; 0 for padding sequences.
        row_tokens_R: int32 index of the token whose hidden row is wanted; padding rows give 0.
    """

    ids_T: jax.Array
    positions_XT: jax.Array
    pool_row_T: jax.Array | None
    page_table_BL: jax.Array
    q_starts_B: jax.Array
    kv_lens_B: jax.Array
    row_tokens_R: jax.Array


class EncodeStep(Protocol):
    """Runs tower layers over a packed call; writes finished rows into the pool.

    Returns the pool and the hidden rows to hand to the next slice of the same call; both rows and
    patches are over "model" where the call has several bins, each device its own bin.
    """

    def __call__(
        self,
        params: Any,
        pool_RJD: jax.Array,
        hidden_PD: jax.Array,
        inputs: EncodeInputs,
        *,
        cfg: Any,
        backend: Backend,
    ) -> tuple[jax.Array, jax.Array]: ...


class TextStep(Protocol):
    """Runs the language model over a ragged batch, writing its K and V into the caches.

    The last row of the pool is zero; no `pool_row_T` names it.

    Returns the hidden rows [R, D] (after the final norm) and the caches.
    """

    def __call__(
        self,
        params: Any,
        caches: tuple[jax.Array, ...],
        pool_RJD: jax.Array | None,
        inputs: TextInputs,
        *,
        cfg: Any,
        backend: Backend,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]: ...


@dataclass(frozen=True)
class TensorMap:
    """How one array of the tree is found in a checkpoint; reversible.

    Args:
        path: dotted path in the params tree: `text.layers.3.q_DNH`.
        key: canonical checkpoint key; with `{}` for arrays stacked on the leading dim.
        layout: the checkpoint's dims in its own order, flattened axes in parentheses: `(NH)D`
            is a matrix [N * H, D]. Without the leading stacked dim. A permutation of the suffix.
        num_stacked: layers that `{}` runs over; None: not stacked.
        stacked_ids: the numbers that `{}` takes when they are not 0..num_stacked-1.
        file_shape: the tensor's shape in the file where one dim of the layout spans several of
            its axes (a convolution kernel); None: the layout's own shape.
        repeat: (dim, n): the tree holds each of the file's entries of that dim n times in a row.
        pad: (dim, size in the file): what the tree holds behind them along that dim is zero.
    """

    path: str
    key: str
    layout: str
    num_stacked: int | None = None
    stacked_ids: tuple[int, ...] | None = None
    file_shape: tuple[int, ...] | None = None
    repeat: tuple[str, int] | None = None
    pad: tuple[str, int] | None = None


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: its module's name.
        model_types: values of `model_type` in config.json that it reads.
        modalities: request modalities that its code supports ("image", "video").
        parse_config: (config.json as a dict, with_vision=, preprocessor=) -> frozen model config.
            `with_vision=False` never touches the vision section and leaves `cfg.vision` None;
            `preprocessor` (preprocessor_config.json or None) gives the pixel mean and std.
        shard: (cfg, number of devices on "model", tower mode "weights" or "data") -> the config
            with the sizes that the tree holds on so many devices. Everything below takes its
            result; without it, the sizes of one device.
        dims: model config -> tables of dims, for tests and the plan: {"text": ..., "vision": ...}.
        abstract_params: (cfg, dtype name) -> tree of jax.ShapeDtypeStruct with the fields `text`
            and `vision` (None where cfg.vision is None).
        axes: cfg -> for "text" and "vision" the map from dims to mesh axes that `placed_params`
            gives to `tree.shardings`.
        checkpoint_map: cfg -> how every array is found.
        key_prefixes: (prefix in a published layout, canonical prefix), tried in order.
        skip_keys: cfg -> regular expressions of canonical keys that may be left unread.
        caches: cfg -> declared caches.
        encoders: kind -> the tower's step; {} for a text family.
        geometry: cfg -> VisionGeometry; only called when cfg.vision is not None.
        text_step: the language model; its params are `params.text`, an encoder's `params.vision`.
        head: params -> the subtree that `logits` reads (the tied or untied output matrix).
        logits: (head, hidden_RD, cfg=, backend=) -> float32 logits_RV, V the `logits_width`;
            -inf from `vocab_size` on.
        vocab_size: cfg -> ids that exist.
        logits_width: cfg -> columns of the logits, padding included.
        text_width: cfg -> D.
    """

    name: str
    model_types: tuple[str, ...]
    modalities: tuple[str, ...]
    parse_config: Callable[..., Any]
    shard: Callable[[Any, int, str], Any]
    dims: Callable[[Any], Mapping[str, Mapping[str, int]]]
    abstract_params: Callable[[Any, str], Any]
    axes: Callable[[Any], Mapping[str, Mapping[str, str | None]]]
    checkpoint_map: Callable[[Any], tuple[TensorMap, ...]]
    key_prefixes: tuple[tuple[str, str], ...]
    skip_keys: Callable[[Any], tuple[str, ...]]
    caches: Callable[[Any], tuple[PagedCache, ...]]
    encoders: Mapping[str, EncodeStep]
    geometry: Callable[[Any], VisionGeometry]
    text_step: TextStep
    head: Callable[[Any], Any]
    logits: Callable[..., jax.Array]
    vocab_size: Callable[[Any], int]
    logits_width: Callable[[Any], int]
    text_width: Callable[[Any], int]


def placed_params(family: Family, cfg: Any, dtype: str, mesh: Mesh) -> Any:
    """The family's abstract tree, each array with its place on the mesh."""
    params, axes = family.abstract_params(cfg, dtype), family.axes(cfg)
    parts = {
        name: tree.with_shardings(part, tree.shardings(part, mesh, axes[name]))
        for name in ("text", "vision")
        if (part := getattr(params, name)) is not None
    }
    return params.replace(**parts)


def check_family(family: Family) -> None:
    """Checks that a record keeps its own contract; run at start, before any weight is read.

    Raises:
        ConfigError: the family declares modalities without an encoder or the reverse.
    """
    if bool(family.modalities) != bool(family.encoders):
        raise ConfigError(
            f"family {family.name!r} declares modalities {family.modalities} with encoders "
            f"{tuple(family.encoders)}: both or neither"
        )
    unknown = set(family.modalities) - {"image", "video"}
    if unknown:
        raise ConfigError(f"family {family.name!r} declares unknown modalities {sorted(unknown)}")
    if not family.model_types:
        raise ConfigError(f"family {family.name!r} names no model_type of config.json")
