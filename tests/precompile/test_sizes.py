"""Sizes from config.json: parameter counts equal transformers', work follows from them."""

import json
from typing import Any

import pytest

from tests.precompile.named import CONFIGS, config_of
from tpu_vl import demo, tree
from tpu_vl.errors import ConfigError
from tpu_vl.models.registry import family_of
from tpu_vl.precompile.sizes import Weight, model_sizes

ALL = sorted(p.stem for p in CONFIGS.glob("*.json"))
# One of each model type; the others repeat their formulas with other numbers.
EACH = (
    "qwen2_vl_2b",
    "qwen2_5_vl_3b",
    "qwen3_vl_4b",
    "qwen3_vl_30b_a3b",
    "qwen3_5_4b",
    "qwen3_5_35b_a3b",
    "qwen3_8_flash_next",
)


def transformers_values(config: dict[str, Any]) -> int:
    """Parameters of transformers' own model, built without memory."""
    torch: Any = pytest.importorskip("torch", reason="the count is of transformers' torch model")
    from transformers import AutoConfig, AutoModelForImageTextToText

    kwargs = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(config["model_type"], **kwargs)
        )
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", EACH)
def test_counts_equal_those_of_transformers(name: str) -> None:
    config = config_of(name)
    assert model_sizes(config).num_values == transformers_values(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ALL) - set(EACH)))
def test_counts_of_every_checkpoint_equal_those_of_transformers(name: str) -> None:
    config = config_of(name)
    assert model_sizes(config).num_values == transformers_values(config)


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith("qwen3_vl") and "_a" not in n])
def test_served_families_count_the_same_from_their_own_trees(name: str) -> None:
    config = config_of(name)
    family = family_of(config)
    params = family.abstract_params(family.parse_config(config), "bfloat16")
    sizes = model_sizes(config)
    assert tree.num_bytes(params) == 2 * sizes.num_values
    tower = sum(w.num_values for w in sizes.weights if w.kind == "tower")
    assert tree.num_bytes(params.vision) == 2 * tower


def test_the_bundled_model_has_sizes_too() -> None:
    config = json.loads((demo.CHECKPOINT / "config.json").read_text())
    family = family_of(config)
    params = family.abstract_params(family.parse_config(config), "float32")
    assert tree.num_bytes(params) == 4 * model_sizes(config).num_values


def published(name: str) -> float:
    """The size in a name in units of 10^9: qwen3_vl_30b_a3b -> 30, qwen3_5_0_8b -> 0.8."""
    parts = name.split("_")
    index = next(i for i, part in enumerate(parts) if part.endswith("b") and part[:-1].isdigit())
    size = float(parts[index][:-1])
    return size / 10 if parts[index - 1] == "0" else size


@pytest.mark.parametrize("name", [n for n in ALL if n != "qwen3_8_flash_next"])
def test_counts_are_near_the_names(name: str) -> None:
    billions = model_sizes(config_of(name)).num_values / 1e9
    # Towers and embeddings are often left out of the names: 3b counts 3.75.
    assert 0.97 * published(name) < billions < 1.26 * published(name)


def test_experts_that_a_token_visits() -> None:
    decoder = model_sizes(config_of("qwen3_vl_235b_a22b")).decoder
    active = decoder.dense_values + decoder.experts_per_token * decoder.expert_values
    assert 20e9 < active < 22e9
    decoder = model_sizes(config_of("qwen3_5_397b_a17b")).decoder
    active = decoder.dense_values + decoder.experts_per_token * decoder.expert_values
    assert 14e9 < active < 17e9


def test_hybrids_page_one_layer_in_four_and_keep_a_state() -> None:
    decoder = model_sizes(config_of("qwen3_5_397b_a17b")).decoder
    assert (decoder.num_layers, decoder.num_attention_layers) == (60, 15)
    recurrent = 45 * 64 * 128 * 128 * 4
    assert recurrent < decoder.state_bytes < 1.05 * recurrent
    assert model_sizes(config_of("qwen3_vl_8b")).decoder.state_bytes == 0


def test_dims_that_do_not_divide_stay_whole() -> None:
    weight = Weight("keys", "layer", (2048, 4, 128), 1)
    assert weight.local_shape(2) == (2048, 2, 128)
    assert weight.local_shape(16) == (2048, 4, 128)
    assert Weight("norm", "layer", (2048,)).local_shape(4) == (2048,)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "llava"}, "'llava'"),
        ({"model_type": "qwen3_vl", "text_config": {"hidden_size": 8}}, "vocab_size"),
    ],
)
def test_what_has_no_formula_is_an_error(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_sizes(config)
