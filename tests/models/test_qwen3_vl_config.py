"""Configs: every published size parses, and what the model does not compute is refused by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from tpu_vl import tree
from tpu_vl.errors import ConfigError
from tpu_vl.models import qwen3_vl
from tpu_vl.models.family import check_family
from tpu_vl.models.registry import FAMILIES, family_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# size -> (tied, text layers, tower depth, parameters of the published checkpoint)
PUBLISHED = {
    "2b": (True, 28, 24, 2_127_532_032),
    "4b": (True, 36, 24, 4_437_815_808),
    "8b": (False, 36, 27, 8_767_123_696),
    "32b": (False, 64, 27, 33_357_390_064),
}


def published(size: str = "8b") -> dict[str, Any]:
    return json.loads((CONFIGS / f"qwen3_vl_{size}.json").read_text())


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_parse(size: str) -> None:
    tied, layers, depth, num_params = PUBLISHED[size]
    cfg = qwen3_vl.parse_config(published(size))
    assert cfg.vision is not None
    assert (cfg.tie_word_embeddings, cfg.text.num_layers, cfg.vision.depth) == (tied, layers, depth)
    assert cfg.text.rope_theta == 5e6
    assert cfg.text.rope_sections == (24, 20, 20)
    abstract = qwen3_vl.abstract_params(cfg, "bfloat16")
    assert tree.num_bytes(abstract) == 2 * num_params
    paths = [tree.path_text(p) for p, _ in jax.tree_util.tree_leaves_with_path(abstract)]
    assert sorted(paths) == sorted(m.path for m in qwen3_vl.checkpoint_map(cfg))
    geometry = qwen3_vl.geometry(cfg)
    assert (geometry.patch_width, geometry.position_side, geometry.num_levels) == (1536, 48, 3)


def test_new_spelling_of_the_rotary_settings_is_the_same_config() -> None:
    old = published()
    new = copy.deepcopy(old)
    text = new["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    assert qwen3_vl.parse_config(new) == qwen3_vl.parse_config(old)


def test_pixel_statistics_come_from_the_preprocessor() -> None:
    statistics = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    cfg = qwen3_vl.parse_config(published(), preprocessor=statistics)
    assert cfg.vision is not None
    assert cfg.vision.pixel_mean == (0.1, 0.2, 0.3)
    assert cfg.vision.pixel_std == (0.4, 0.5, 0.6)
    with pytest.raises(ConfigError, match="do_normalize"):
        qwen3_vl.parse_config(published(), preprocessor={"do_normalize": False})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        *(
            ("text_config", key)
            for key in (
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "intermediate_size",
                "vocab_size",
                "rms_norm_eps",
                "rope_theta",
                "max_position_embeddings",
            )
        ),
        *(
            ("vision_config", key)
            for key in (
                "depth",
                "hidden_size",
                "num_heads",
                "intermediate_size",
                "patch_size",
                "temporal_patch_size",
                "spatial_merge_size",
                "out_hidden_size",
                "num_position_embeddings",
                "deepstack_visual_indexes",
            )
        ),
        (None, "image_token_id"),
        (None, "vision_end_token_id"),
    ],
)
def test_missing_key_is_named(section: str | None, key: str) -> None:
    config = published()
    del (config[section] if section else config)[key]
    with pytest.raises(ConfigError, match=f"lacks '{key}'"):
        qwen3_vl.parse_config(config)


def text(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["text_config"].update(values)


def rope(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["text_config"]["rope_scaling"].update(values)


def vision(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["vision_config"].update(values)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (text(attention_bias=True), "attention_bias"),
        (text(hidden_act="gelu"), "hidden_act"),
        (text(num_hidden_layers=0), "num_hidden_layers"),
        (text(hidden_size="4096"), "hidden_size"),
        (text(num_key_value_heads=7), "num_key_value_heads"),
        (text(num_hidden_layers=2), "deepstack_visual_indexes"),
        (rope(rope_type="yarn"), "rope_type"),
        (rope(mrope_interleaved=False), "mrope_interleaved"),
        (rope(mrope_section=[16, 24, 25]), "mrope_section"),
        (rope(mrope_section=[32, 32]), "mrope_section"),
        (vision(hidden_act="gelu"), "hidden_act"),
        (vision(in_channels=4), "in_channels"),
        (vision(out_hidden_size=2048), "out_hidden_size"),
        (vision(num_heads=7), "num_heads"),
        (vision(num_position_embeddings=2300), "num_position_embeddings"),
        (vision(deepstack_visual_indexes=[8, 16, 27]), "deepstack_visual_indexes"),
        (vision(patch_size=[16, 16]), "patch_size"),
        (lambda config: config.update(quantization_config={}), "quantization_config"),
    ],
)
def test_unsupported_value_is_named(change: Callable[[Any], None], named: str) -> None:
    config = published()
    change(config)
    with pytest.raises(ConfigError, match=named):
        qwen3_vl.parse_config(config)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    cfg = qwen3_vl.parse_config(published("2b"))
    with pytest.raises(ConfigError, match="use bfloat16 or float32"):
        qwen3_vl.abstract_params(cfg, dtype)


@pytest.mark.parametrize(("outer", "nested", "tied"), [(False, True, False), (True, False, True)])
def test_outer_tie_flag_wins(outer: bool, nested: bool, tied: bool) -> None:
    config = published()
    config["tie_word_embeddings"] = outer
    config["text_config"]["tie_word_embeddings"] = nested
    cfg = qwen3_vl.parse_config(config)
    assert cfg.tie_word_embeddings is tied
    assert ("text.head_VD" in {m.path for m in qwen3_vl.checkpoint_map(cfg)}) is not tied


def test_text_only_never_reads_the_vision_section() -> None:
    config = published()
    config["vision_config"] = {"depth": "nonsense"}
    cfg = qwen3_vl.parse_config(config, with_vision=False)
    assert cfg.vision is None
    assert qwen3_vl.abstract_params(cfg, "bfloat16").vision is None
    assert set(qwen3_vl.dims(cfg)) == {"text"}
    with pytest.raises(ConfigError, match="text only"):
        qwen3_vl.geometry(cfg)


def test_registry_finds_families_by_model_type() -> None:
    for family in FAMILIES:
        check_family(family)
        for model_type in family.model_types:
            assert family_of({"model_type": model_type}) is family
    with pytest.raises(ConfigError, match=r"'llava'.*qwen3_vl, qwen3_vl_text"):
        family_of({"model_type": "llava"})
    with pytest.raises(ConfigError, match="None"):
        family_of({})
