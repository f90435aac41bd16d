"""What a config.json says of sizes, for every published Qwen vision-language model type.

Weights, caches and work follow from config values alone, also for model types that have no serving
code here: the plan answers for those by formula only. Counts equal transformers' parameter counts.

Dims: D width, N query heads, K kv heads, H head width, F mlp, V vocabulary, E experts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tpu_vl.errors import ConfigError
from tpu_vl.precompile.estimate import DecoderSizes, TowerSizes

Kind = Literal["embed", "head", "layer", "expert", "lookup", "tower"]
CHANNELS = 3


@dataclass(frozen=True)
class Weight:
    """Equal arrays of a checkpoint.

    Args:
        name: what it is, for tables.
        kind: "embed" and "lookup" are read by row, "head" once a step, "layer" and "expert" are
            the decoder's, "tower" the vision encoder's.
        shape: of one array.
        split: index of the dim that devices share; None: whole on every device.
        count: arrays of that shape.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    split: int | None = None
    count: int = 1

    @property
    def num_values(self) -> int:
        """Values of all arrays."""
        return math.prod(self.shape) * self.count

    def local_shape(self, num_devices: int) -> tuple[int, ...]:
        """The part of one array on one device; whole where the dim does not divide."""
        if self.split is None or self.shape[self.split] % num_devices:
            return self.shape
        local = list(self.shape)
        local[self.split] //= num_devices
        return tuple(local)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A model by its sizes.

    Args:
        model_type: of config.json.
        weights: every array of the checkpoint, but multi-token-prediction layers.
        decoder: what the language model's time follows from.
        tower: what the vision tower's time follows from; None in a text model.
        max_positions: context limit in tokens.
    """

    model_type: str
    weights: tuple[Weight, ...]
    decoder: DecoderSizes
    tower: TowerSizes | None
    max_positions: int

    @property
    def num_values(self) -> int:
        """Parameters of the model."""
        return sum(w.num_values for w in self.weights)


def model_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes of a model from its config.json.

    Args:
        config: config.json as a dict, flat (older checkpoints) or with a `text_config`.

    Raises:
        ConfigError: the model type is none of the Qwen vision-language families, or a size that
            the formula needs is missing.
    """
    model_type = str(config.get("model_type"))
    if model_type not in _TYPES:
        raise ConfigError(
            f"config.json: model_type {model_type!r} has no formula; known: "
            f"{', '.join(sorted(_TYPES))}"
        )
    try:
        return _model_sizes(model_type, config)
    except KeyError as error:
        raise ConfigError(
            f"config.json of type {model_type!r} lacks {error}: use a complete config.json"
        ) from error


def _model_sizes(model_type: str, config: Mapping[str, Any]) -> ModelSizes:
    text: Mapping[str, Any] = config.get("text_config") or config
    vision: Mapping[str, Any] | None = config.get("vision_config")
    d, v = text["hidden_size"], text["vocab_size"]
    weights = [Weight("embedding", "embed", (v, d), 0), Weight("final norm", "layer", (d,))]
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if not tied:
        weights.append(Weight("output", "head", (v, d), 0))
    layers = text["num_hidden_layers"]
    full = _full_attention_layers(model_type, text)
    weights += _attention(model_type, text, full)
    weights += _gated_delta(text, layers - full) if full < layers else []
    weights += _mlp(text, layers)
    weights.append(Weight("layer norms", "layer", (d,), count=_norms(model_type, layers)))
    if model_type == "qwen4_exp":
        weights += _hyper_connections(text)
    tower = None
    if vision is not None:
        tower, arrays = _tower(model_type, vision)
        weights += arrays
    return ModelSizes(
        model_type=model_type,
        weights=tuple(weights),
        decoder=_decoder(text, weights, full),
        tower=tower,
        max_positions=text["max_position_embeddings"],
    )


_TYPES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_text",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
)


# The older checkpoints leave these out of their vision section.
_VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {
        "depth": 32,
        "embed_dim": 1280,
        "num_heads": 16,
        "mlp_ratio": 4,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    },
    "qwen2_5_vl": {
        "depth": 32,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    },
}


def _head_dim(text: Mapping[str, Any]) -> int:
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _full_attention_layers(model_type: str, text: Mapping[str, Any]) -> int:
    """Layers with paged K and V; the rest are recurrent."""
    layers = text["num_hidden_layers"]
    if model_type not in ("qwen3_5", "qwen3_5_moe", "qwen4_exp"):
        return layers
    if text.get("layer_types"):
        return sum(kind != "linear_attention" for kind in text["layer_types"])
    return layers // text.get("full_attention_interval", 4)


def _norms(model_type: str, layers: int) -> int:
    # Hyper-connections norm their own streams instead.
    return 0 if model_type == "qwen4_exp" else 2 * layers


def _attention(model_type: str, text: Mapping[str, Any], count: int) -> list[Weight]:
    d, n, k, h = (
        text["hidden_size"],
        text["num_attention_heads"],
        text["num_key_value_heads"],
        _head_dim(text),
    )
    gated = model_type in ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
    arrays = [
        Weight("query", "layer", (d, n, h * (2 if gated else 1)), 1, count),
        Weight("key, value", "layer", (d, k, h), 1, 2 * count),
        Weight("attention output", "layer", (n, h, d), 0, count),
    ]
    if model_type in ("qwen2_vl", "qwen2_5_vl"):
        arrays.append(Weight("query bias", "layer", (n, h), 0, count))
        arrays.append(Weight("key, value bias", "layer", (k, h), 0, 2 * count))
    else:
        arrays.append(Weight("head norms", "layer", (h,), count=2 * count))
    if model_type == "qwen4_exp" and text.get("indexer_n_heads"):
        width = text["indexer_head_dim"]
        heads = text["indexer_n_heads"] + text["indexer_kv_heads"]
        arrays.append(Weight("indexer", "layer", (d, heads * width), count=count))
        arrays.append(Weight("indexer norms", "layer", (width,), count=2 * count))
    return arrays


def _delta_dims(text: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Key heads, value heads, their widths and the convolution's kernel."""
    return (
        text["linear_num_key_heads"],
        text["linear_num_value_heads"],
        text["linear_key_head_dim"],
        text["linear_value_head_dim"],
        text["linear_conv_kernel_dim"],
    )


def _gated_delta(text: Mapping[str, Any], count: int) -> list[Weight]:
    d = text["hidden_size"]
    keys, values, key_width, value_width, kernel = _delta_dims(text)
    channels = 2 * keys * key_width + values * value_width
    return [
        Weight("delta query, key", "layer", (d, keys, key_width), 1, 2 * count),
        Weight("delta value, gate", "layer", (d, values, value_width), 1, 2 * count),
        Weight("delta rates", "layer", (d, values), 1, 2 * count),
        Weight("delta convolution", "layer", (channels, kernel), count=count),
        Weight("delta time, decay", "layer", (values,), 0, 2 * count),
        Weight("delta norm", "layer", (value_width,), count=count),
        Weight("delta output", "layer", (values, value_width, d), 0, count),
    ]


def _gated_mlp(name: str, d: int, f: int, count: int) -> list[Weight]:
    return [
        Weight(f"{name} gate, up", "layer", (d, f), 1, 2 * count),
        Weight(f"{name} down", "layer", (f, d), 0, count),
    ]


def _mlp(text: Mapping[str, Any], layers: int) -> list[Weight]:
    d, experts = text["hidden_size"], text.get("num_experts")
    if not experts:
        return _gated_mlp("mlp", d, text["intermediate_size"], layers)
    dense = len(text.get("mlp_only_layers") or ())
    f, sparse = text["moe_intermediate_size"], layers - dense
    arrays = _gated_mlp("mlp", d, text["intermediate_size"], dense) if dense else []
    arrays += [
        Weight("experts gate, up", "expert", (experts, d, 2 * f), 0, sparse),
        Weight("experts down", "expert", (experts, f, d), 0, sparse),
        Weight("router", "layer", (d, experts), count=sparse),
    ]
    if text.get("shared_expert_intermediate_size"):
        shared = text["shared_expert_intermediate_size"]
        arrays += _gated_mlp("shared expert", d, shared, sparse)
        arrays.append(Weight("shared expert's gate", "layer", (d,), count=sparse))
    return arrays


def _hyper_connections(text: Mapping[str, Any]) -> list[Weight]:
    """Residual streams and the hashed n-gram embedding of `qwen4_exp`."""
    d, streams, rank = text["hidden_size"], text["hc_count"], text["hc_lowrank"]
    wide, layers = d * streams, text["num_hidden_layers"]
    mixers = 2 * layers + 1
    arrays = [
        Weight("stream norms", "layer", (wide,), count=mixers),
        Weight("stream mixers", "layer", (wide, rank), count=2 * mixers),
        Weight("stream injection", "layer", (wide, streams), count=2 * layers),
        # The stream mixer of the end takes the place of the final norm.
        Weight("final norm", "layer", (d,), count=-1),
    ]
    embed = text.get("ple_embed_dim") or d
    for index, _ in enumerate(text.get("ple_layer_ids") or ()):
        rows, width = _ngram_table(text, index, embed)
        arrays += [
            # Split by column, as the rows are looked up by hash.
            Weight("n-gram embedding", "lookup", (rows, width), 1),
            Weight("n-gram key", "layer", (embed, wide), 1),
            Weight("n-gram value", "layer", (embed, d), 1),
            Weight("n-gram norms", "layer", (wide,), count=3),
            Weight("n-gram convolution", "layer", (wide, text["ple_conv_kernel_size"])),
        ]
    return arrays


def _ngram_table(text: Mapping[str, Any], index: int, embed: int) -> tuple[int, int]:
    """Rows and width of the `index`-th n-gram table: a prime number of rows for each head."""
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    primes = _primes_from(text["ngram_vocab_size_base"])
    sizes = [next(primes) for _ in range(heads * (index + 1))][heads * index :]
    unit = text["make_ngram_vocab_size_divisible_by"]
    return -(-sum(sizes) // unit) * unit, embed // heads


def _primes_from(start: int) -> Iterator[int]:
    number = start
    while True:
        if number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


def _decoder(text: Mapping[str, Any], weights: list[Weight], full: int) -> DecoderSizes:
    experts = text.get("num_experts") or 0
    routed = sum(w.num_values for w in weights if w.kind == "expert")
    state_bytes = 0
    if full < text["num_hidden_layers"]:
        keys, values, key_width, value_width, kernel = _delta_dims(text)
        channels = 2 * keys * key_width + values * value_width
        # The recurrent state is float32, the last inputs of the convolution bfloat16.
        one = 4 * values * key_width * value_width + 2 * channels * (kernel - 1)
        state_bytes = (text["num_hidden_layers"] - full) * one
    return DecoderSizes(
        num_layers=text["num_hidden_layers"],
        width=text["hidden_size"],
        vocab_size=text["vocab_size"],
        dense_values=sum(w.num_values for w in weights if w.kind == "layer"),
        num_experts=experts,
        experts_per_token=text["num_experts_per_tok"] if experts else 0,
        expert_values=routed // experts if experts else 0,
        num_attention_layers=full,
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=_head_dim(text),
        state_bytes=state_bytes,
    )


def _tower(model_type: str, given: Mapping[str, Any]) -> tuple[TowerSizes, list[Weight]]:
    vision = {**_VISION_DEFAULTS.get(model_type, {}), **given}
    old, gated = model_type == "qwen2_vl", model_type == "qwen2_5_vl"
    width = vision["embed_dim"] if old else vision["hidden_size"]
    mlp = int(width * vision.get("mlp_ratio", 4)) if old else vision["intermediate_size"]
    tower = TowerSizes(
        depth=vision["depth"],
        width=width,
        num_heads=vision["num_heads"],
        head_dim=width // vision["num_heads"],
        mlp_width=mlp,
        patch_width=CHANNELS * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        merge_cells=vision["spatial_merge_size"] ** 2,
        out_width=vision["hidden_size"] if old else vision["out_hidden_size"],
        num_mergers=1 + len(vision.get("deepstack_visual_indexes") or ()),
        mlp_matrices=3 if gated else 2,
    )
    positions = 0 if old or gated else vision["num_position_embeddings"]
    return tower, [
        *_tower_layers(tower, rms=gated),
        *_tower_ends(tower, positions, rms=gated),
    ]


def _tower_layers(t: TowerSizes, *, rms: bool) -> list[Weight]:
    d, n, h, f, y = t.width, t.num_heads, t.head_dim, t.mlp_width, t.depth
    inner = t.mlp_matrices - 1
    return [
        Weight("tower norms", "tower", (y, d), count=2 if rms else 4),
        Weight("tower query, key, value", "tower", (y, d, n, h), 2, 3),
        Weight("tower query, key, value bias", "tower", (y, n, h), 1, 3),
        Weight("tower attention output", "tower", (y, n, h, d), 1),
        Weight("tower attention output bias", "tower", (y, d)),
        Weight("tower mlp in", "tower", (y, d, f), 2, inner),
        Weight("tower mlp in bias", "tower", (y, f), 1, inner),
        Weight("tower mlp out", "tower", (y, f, d), 1),
        Weight("tower mlp out bias", "tower", (y, d)),
    ]


def _tower_ends(t: TowerSizes, positions: int, *, rms: bool) -> list[Weight]:
    cell, mergers, taps = t.width * t.merge_cells, t.num_mergers, t.num_mergers - 1
    arrays = [
        Weight("patch embedding", "tower", (t.patch_width, t.width)),
        Weight("merger norm", "tower", (t.width,), count=1 if rms else 2),
        Weight("merger in", "tower", (cell, cell), 1, mergers),
        Weight("merger in bias", "tower", (cell,), 0, mergers),
        Weight("merger out", "tower", (cell, t.out_width), 0, mergers),
        Weight("merger out bias", "tower", (t.out_width,), count=mergers),
    ]
    if taps:
        arrays.append(Weight("deepstack norms", "tower", (cell,), count=2 * taps))
    if positions:
        arrays.append(Weight("patch embedding bias", "tower", (t.width,)))
        arrays.append(Weight("position table", "tower", (positions, t.width)))
    return arrays
