"""The sizes of Qwen3-VL: its config.json, and what so many devices hold of them.

Dims: D width, N query heads, K kv heads, H head width, F mlp, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpu_vl.errors import ConfigError
from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.mesh import MODEL
from tpu_vl.models import qwen3_vision_config, tensor_parallel
from tpu_vl.models.hf_config import Section
from tpu_vl.models.qwen3_vision_config import VisionConfig

DEFAULT_SECTIONS = (24, 20, 20)
AXES = {"N": MODEL, "K": MODEL, "F": MODEL, "U": MODEL, "V": MODEL}


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Sizes of the language model.

    Args:
        num_layers, width, num_heads, num_kv_heads, head_dim, mlp_width, vocab_size: sizes.
        norm_eps: of every RMS norm.
        rope_theta: base wavelength.
        rope_sections: rotary frequencies of time, rows and columns.
        max_positions: context that the checkpoint was trained for, in tokens.
        num_shards: devices on "model"; the sizes above are the checkpoint's, those of `dims` are
            what the tree holds on so many.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_sections: tuple[int, int, int]
    max_positions: int
    num_shards: int = 1


@dataclass(frozen=True, kw_only=True)
class MediaIds:
    """Token ids that stand for media in a prompt."""

    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig:
    """The whole model; `vision` and `ids` are None in a text-only process."""

    text: TextConfig
    vision: VisionConfig | None
    ids: MediaIds | None
    tie_word_embeddings: bool


def parse_config(
    config: Mapping[str, Any],
    *,
    with_vision: bool = True,
    preprocessor: Mapping[str, Any] | None = None,
) -> Qwen3VLConfig:
    """Reads a config.json of model type `qwen3_vl` or `qwen3_vl_text`.

    Args:
        config: config.json as a dict, of either spelling of the rotary settings.
        with_vision: False leaves the vision section untouched and `vision` None; so does a
            config without one.
        preprocessor: preprocessor_config.json, for the pixel mean and deviation.

    Raises:
        ConfigError: a key is missing or has a value that the model does not compute.
    """
    outer = Section(config, "config.json")
    if outer.has("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config: quantised checkpoints are not supported by "
            "this family; use the bfloat16 checkpoint of the model"
        )
    text = outer.section("text_config") if outer.has("text_config") else outer
    tied = outer if outer.has("tie_word_embeddings") else text
    tied.must_be("tie_word_embeddings", True, False)
    cfg = Qwen3VLConfig(
        text=_parse_text_config(text),
        vision=None,
        ids=None,
        tie_word_embeddings=bool(tied.values.get("tie_word_embeddings")),
    )
    if not (with_vision and outer.has("vision_config")):
        return cfg
    vision = qwen3_vision_config.parse_vision_config(outer.section("vision_config"), preprocessor)
    _check_vision_fits(cfg.text, vision)
    ids = MediaIds(
        image=outer.token_id("image_token_id"),
        video=outer.token_id("video_token_id"),
        vision_start=outer.token_id("vision_start_token_id"),
        vision_end=outer.token_id("vision_end_token_id"),
    )
    return Qwen3VLConfig(
        text=cfg.text, vision=vision, ids=ids, tie_word_embeddings=cfg.tie_word_embeddings
    )


def _parse_text_config(section: Section) -> TextConfig:
    section.must_be("attention_bias", False)
    section.must_be("hidden_act", "silu")
    new_style = section.has("rope_parameters")
    old = section.section("rope_scaling") if section.has("rope_scaling") else Section({}, "")
    rope = section.section("rope_parameters") if new_style else old
    rope.must_be("rope_type", "default", "mrope")
    rope.must_be("type", "default", "mrope")
    rope.must_be("mrope_interleaved", True)
    sections = rope.indices("mrope_section") if rope.has("mrope_section") else DEFAULT_SECTIONS
    if len(sections) != 3:
        raise ConfigError(f"{rope.name}: mrope_section is {sections}; three sizes are needed")
    cfg = TextConfig(
        num_layers=section.size("num_hidden_layers"),
        width=section.size("hidden_size"),
        num_heads=section.size("num_attention_heads"),
        num_kv_heads=section.size("num_key_value_heads"),
        head_dim=section.size("head_dim"),
        mlp_width=section.size("intermediate_size"),
        vocab_size=section.size("vocab_size"),
        norm_eps=section.number("rms_norm_eps"),
        rope_theta=(rope if rope.has("rope_theta") else section).number("rope_theta"),
        rope_sections=(sections[0], sections[1], sections[2]),
        max_positions=section.size("max_position_embeddings"),
    )
    if cfg.num_heads % cfg.num_kv_heads or cfg.head_dim % 2:
        raise ConfigError(
            f"{section.name}: num_attention_heads {cfg.num_heads} must be a multiple of "
            f"num_key_value_heads {cfg.num_kv_heads}, and head_dim {cfg.head_dim} even"
        )
    return cfg


def _check_vision_fits(text: TextConfig, vision: VisionConfig) -> None:
    if vision.out_width != text.width:
        raise ConfigError(
            f"config.json: vision out_hidden_size {vision.out_width} is not the language model's "
            f"hidden_size {text.width}"
        )
    if len(vision.tap_layers) > text.num_layers:
        raise ConfigError(
            f"config.json: {len(vision.tap_layers)} deepstack_visual_indexes need as many decoder "
            f"layers, but num_hidden_layers is {text.num_layers}"
        )
    if sum(text.rope_sections) != text.head_dim // 2:
        raise ConfigError(
            f"config.json: mrope_section {list(text.rope_sections)} must sum to head_dim / 2 = "
            f"{text.head_dim // 2}"
        )


def shard(cfg: Qwen3VLConfig, num_shards: int, tower_mode: str) -> Qwen3VLConfig:
    """The config with the sizes that the tree holds on `num_shards` devices.

    Args:
        cfg: as parsed.
        num_shards: devices on the "model" axis.
        tower_mode: "weights" or "data", see `qwen3_vision_config.shard`.

    Raises:
        ConfigError: query heads that do not divide; lists the sizes that fit.
    """
    tensor_parallel.check_heads(cfg.text.num_heads, cfg.text.num_kv_heads, num_shards)
    vision = cfg.vision and qwen3_vision_config.shard(cfg.vision, num_shards, tower_mode)
    return replace(cfg, text=replace(cfg.text, num_shards=num_shards), vision=vision)


def axes(cfg: Qwen3VLConfig) -> Mapping[str, Mapping[str, str | None]]:
    """The mesh axis of each dim; a tower in data mode is whole on every device.

    Devices share the embedding by its width where it is only looked up: each has its part of every
    row. One that is the output matrix too is shared by tokens, as that is.
    """
    whole = cfg.vision is not None and cfg.vision.num_bins > 1
    by_width = not cfg.tie_word_embeddings and cfg.text.width % cfg.text.num_shards == 0
    return {
        "text": {**AXES, "E" if by_width else "I": MODEL},
        "vision": {} if whole else AXES,
    }


def text_dims(text: TextConfig) -> dict[str, int]:
    """The table of dims as the tree holds them: K/V heads copied, F and the vocabulary padded.

    The embedding is [I, E]; I is V and E is D, which it shares with the devices in its own way.
    """
    shards = text.num_shards
    # A device's part of the logits, and of all that goes with them, fills whole lanes.
    vocab = round_up(text.vocab_size, shards * NUM_LANES) if shards > 1 else text.vocab_size
    return {
        "D": text.width,
        "N": text.num_heads,
        "K": tensor_parallel.held_kv_heads(text.num_kv_heads, shards),
        "H": text.head_dim,
        "F": round_up(text.mlp_width, shards),
        "V": vocab,
        "I": vocab,
        "E": text.width,
    }


def dims(cfg: Qwen3VLConfig) -> dict[str, dict[str, int]]:
    """Tables of dims of the language model and, where present, the tower."""
    tables = {"text": text_dims(cfg.text)}
    if cfg.vision is not None:
        tables["vision"] = qwen3_vision_config.vision_dims(cfg.vision)
    return tables
