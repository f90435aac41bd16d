"""Which numbers of devices a model takes, what each holds, and what start-up says of the rest."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.tensor_parallel.model import config_dict, model_config
from tpu_vl import defaults, demo, launch, tree
from tpu_vl.checkpoint import open_checkpoint
from tpu_vl.errors import ConfigError
from tpu_vl.flags import ServeFlags
from tpu_vl.mesh import make_mesh
from tpu_vl.models import qwen3_vision_config, tensor_parallel
from tpu_vl.models.family import Backend, placed_params
from tpu_vl.models.qwen3_vl import FAMILY
from tpu_vl.precompile import tower_plan
from tpu_vl.precompile.estimate import TowerSizes
from tpu_vl.sized import size_model

PROCESSOR = defaults.PUBLISHED_PROCESSOR


def checkpoint_with(folder: Path, *, tower_heads: int | None = None, **text: int) -> Path:
    """A copy of the bundled checkpoint's config with other heads."""
    config = json.loads((demo.CHECKPOINT / "config.json").read_text())
    config["text_config"] |= text
    if tower_heads is not None:
        config["vision_config"] |= {"num_heads": tower_heads, "hidden_size": 8 * tower_heads}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sized(folder: Path, size: int, **flags: Any) -> Any:
    mesh = make_mesh(size)
    wanted = ServeFlags(tensor_parallel_size=size, model=str(folder), **flags)
    return size_model(wanted, open_checkpoint(str(folder)), mesh)


def test_query_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(tmp_path: Path) -> None:
    folder = checkpoint_with(tmp_path, num_attention_heads=12, num_key_value_heads=2)
    with pytest.raises(ConfigError) as caught:
        sized(folder, 8)
    assert "--tensor-parallel-size 8 does not divide the 12 query heads" in caught.value.message
    assert "(2 K/V heads" in caught.value.message
    assert caught.value.message.endswith("use one of 1, 2, 3, 4, 6, 12")
    for size in (1, 2, 3, 4, 6):
        held = FAMILY.caches(sized(folder, size).cfg)[0].num_kv_heads
        assert held % size == 0


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "held"),
    [(12, 2, 1, 2), (12, 2, 2, 2), (12, 2, 3, 6), (12, 2, 4, 4), (12, 2, 6, 6), (12, 2, 12, 12),
     (32, 8, 16, 16), (64, 4, 8, 8), (24, 4, 8, 8), (16, 16, 8, 16)],
)  # fmt: skip
def test_held_kv_heads_serve_whole_query_heads_of_one_device(
    num_heads: int, num_kv_heads: int, size: int, held: int
) -> None:
    assert tensor_parallel.held_kv_heads(num_kv_heads, size) == held
    assert num_heads % held == held % size == held % num_kv_heads == 0
    # The original of each query head's K/V head is the one that it had.
    for head in range(num_heads):
        copy = head // (num_heads // held)
        assert copy // (held // num_kv_heads) == head // (num_heads // num_kv_heads)


def test_more_devices_than_there_are_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 9 .* 8 \(cpu\).* 1 to 8"):
        launch.make_plan(ServeFlags(tensor_parallel_size=9))
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 .* 2 \(cpu\).* 1 to 2"):
        make_mesh(3, jax.devices()[:2])


@pytest.mark.parametrize("heads", [12, 16, 80])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("wanted", ["auto", "weights"])
def test_tower_heads_that_do_not_divide_fall_back_with_one_line(
    heads: int, size: int, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    tower = TowerSizes(
        depth=27, width=8 * heads, num_heads=heads, head_dim=8, mlp_width=100, patch_width=1536,
        merge_cells=4, out_width=64, num_mergers=4,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        mode = tower_plan.choose_mode(wanted, tower, 1, PROCESSOR, None, size, 65_536)
    divides = heads % size == 0
    assert mode == ("weights" if divides else "data")
    assert len(caplog.records) == (0 if divides else 1)
    if not divides:
        assert f"{heads} heads" in caplog.text
        assert f"{size} devices" in caplog.text


def test_the_fallback_reaches_the_model_and_its_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint_with(
        tmp_path, tower_heads=16, num_attention_heads=12, num_key_value_heads=4
    )
    with caplog.at_level(logging.WARNING):
        model = sized(folder, 3)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert FAMILY.geometry(model.cfg).num_bins == 3
    e = model.engine_config
    assert model.max_frame_patches * 3 == e.patch_capacities[-1]
    assert FAMILY.geometry(sized(folder, 4).cfg).num_bins == 1
    assert FAMILY.geometry(sized(folder, 4, mm_encoder_tp_mode="data").cfg).num_bins == 4


def test_weights_mode_is_never_taken_with_heads_that_do_not_divide() -> None:
    cfg = FAMILY.parse_config(config_dict(tower_heads=16)).vision
    with pytest.raises(ConfigError, match=r"16 heads .* 3 devices.*--mm-encoder-tp-mode data"):
        qwen3_vision_config.shard(cfg, 3, "weights")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("mode", ["weights", "data"])
def test_every_large_array_is_spread_and_none_is_uneven(size: int, mode: str) -> None:
    cfg = model_config(size, mode)
    placed = placed_params(FAMILY, cfg, "float32", make_mesh(size))
    table = FAMILY.dims(cfg)
    assert (table["text"]["K"], table["text"]["F"] % size, table["text"]["V"] % size) == (
        tensor_parallel.held_kv_heads(4, size), 0, 0,
    )  # fmt: skip
    for part, whole in ((placed.text, False), (placed.vision, mode == "data")):
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            dims = set(tree.suffix(tree.leaf_name(path)))
            spread = 1 if whole or not dims & set("NKFUVI") else size
            assert np.prod(leaf.sharding.shard_shape(leaf.shape)) * spread == leaf.size, path


def test_padded_columns_of_the_logits_can_never_be_chosen() -> None:
    cfg = model_config(4, "weights")
    assert (FAMILY.vocab_size(cfg), FAMILY.logits_width(cfg)) == (199, 512)
    # Hidden rows that make every real logit negative: a padded 0 would win.
    head = np.concatenate([np.full((199, 40), -1, np.float32), np.zeros((313, 40), np.float32)])
    backend = Backend(make_mesh(4), "blocked", "blocked", 16)
    out = FAMILY.logits(jax.numpy.asarray(head), jax.numpy.ones((3, 40)), cfg=cfg, backend=backend)
    assert np.asarray(out).argmax(axis=1).max() < 199
    assert np.isneginf(np.asarray(out)[:, 199:]).all()
