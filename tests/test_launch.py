"""What is served, with which sizes: capability, limits and defaults, before a weight is read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tpu_vl import checkpoint, defaults, demo, launch
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import ConfigError
from tpu_vl.flags import ServeFlags
from tpu_vl.mesh import make_mesh
from tpu_vl.models.family import check_family
from tpu_vl.models.registry import family_of


def plan(**flags: Any) -> launch.Plan:
    return launch.make_plan(ServeFlags(**flags))


@pytest.mark.parametrize(
    ("flags", "served", "reason"),
    [
        ({}, ("image", "video"), None),
        ({"text_model_only": True}, (), "--text-model-only"),
        ({"mm_disable": "vision"}, (), "--mm-disable"),
        ({"limit_mm_per_prompt": '{"video": 0}'}, ("image",), "--limit-mm-per-prompt"),
    ],
)
def test_served_modalities_are_decided_in_one_place(
    flags: dict[str, Any], served: tuple[str, ...], reason: str | None
) -> None:
    made = plan(**flags)
    assert made.capability.modalities == served
    assert made.engine_config.modalities == served
    assert all(reason and reason in r for r in made.capability.reason_by_modality.values())
    against = made.capability.reason_against("video")
    assert (against is None) == ("video" in served)


def test_text_only_has_no_tower_and_no_pool() -> None:
    made = plan(text_model_only=True)
    assert made.cfg.vision is None
    assert made.processor is None
    e = made.engine_config
    assert (e.patch_capacities, e.pool_rows) == ((), 0)


def bundled_copy(folder: Path, **changes: Any) -> Path:
    config = json.loads((demo.CHECKPOINT / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key)
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_vision_section_is_never_parsed_in_a_text_only_process(tmp_path: Path) -> None:
    folder = bundled_copy(tmp_path, vision_config={"nonsense": True})
    assert plan(model=str(folder), text_model_only=True).cfg.vision is None
    with pytest.raises(ConfigError, match="vision_config"):
        plan(model=str(folder))


def test_checkpoint_without_vision_serves_text(tmp_path: Path) -> None:
    made = plan(model=str(bundled_copy(tmp_path, vision_config=None)))
    assert made.capability.modalities == ()
    assert "no vision section" in str(made.capability.reason_against("image"))


def test_family_contract_is_checked() -> None:
    family = family_of({"model_type": "qwen3_vl"})
    check_family(family)
    for broken in (
        dataclasses.replace(family, encoders={}),
        dataclasses.replace(family, modalities=()),
        dataclasses.replace(family, modalities=("image", "smell")),
        dataclasses.replace(family, model_types=()),
    ):
        with pytest.raises(ConfigError):
            check_family(broken)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"tensor_parallel_size": 9}, r"9 .* 8 "),
        ({"max_model_len": 10**9}, "--max-model-len 1000000000"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "--max-num-batched-tokens 4"),
        ({"kv_cache_memory_bytes": 1000}, "--kv-cache-memory-bytes"),
        ({"image_min_tokens": 9, "image_max_tokens": 3}, "--image-min-tokens"),
        ({"limit_mm_per_prompt": '{"image": -1}'}, "--limit-mm-per-prompt"),
        ({"limit_mm_per_prompt": '{"sound": 1}'}, "--limit-mm-per-prompt"),
        ({"limit_mm_per_prompt": '{"image": {"width": 3}}'}, "--limit-mm-per-prompt"),
        ({"limit_mm_per_prompt": "many"}, "--limit-mm-per-prompt"),
        ({"model": "/nowhere/at/all"}, "--model /nowhere/at/all"),
    ],
)
def test_start_fails_with_the_flag_and_the_value(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(**flags)


def test_limits_reach_every_picture_and_video() -> None:
    flags = ServeFlags(
        image_max_tokens=256, limit_mm_per_prompt='{"image": 3, "video": {"num_frames": 8}}'
    )
    limits = defaults.media_limits(flags, 4096)
    assert (limits.max_images, limits.max_videos) == (3, MediaLimits().max_videos)
    fitted = defaults.fit_processor(ProcessorConfig(), flags, limits)
    assert fitted.image_max_pixels == 256 * 32 * 32
    assert fitted.video_max_frames == 8


def test_small_capacity_shrinks_media_instead_of_refusing_them() -> None:
    limits = defaults.media_limits(ServeFlags(), 1024)
    fitted = defaults.fit_processor(ProcessorConfig(), ServeFlags(), limits)
    assert fitted.image_max_pixels == 1024 * 256
    assert fitted.video_max_pixels == 1024 * 256 * 2


def test_processor_reads_both_spellings() -> None:
    base = checkpoint.open_checkpoint(str(demo.CHECKPOINT))
    for section in (
        {"size": {"shortest_edge": 4096, "longest_edge": 9216}},
        {"min_pixels": 4096, "max_pixels": 9216},
    ):
        read = checkpoint.processor_config(dataclasses.replace(base, preprocessor=section))
        assert (read.image_min_pixels, read.image_max_pixels) == (4096, 9216)
    bad = dataclasses.replace(base, preprocessor={"min_pixels": 10, "max_pixels": 9})
    with pytest.raises(ConfigError, match=r"10\.\.9"):
        checkpoint.processor_config(bad)


@pytest.mark.parametrize("name", ["qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_8b", "qwen3_vl_32b"])
def test_published_sizes_get_an_engine_config(name: str) -> None:
    config = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    family = family_of(config)
    cfg = family.parse_config(config, with_vision=True, preprocessor=None)
    flags = ServeFlags(tensor_parallel_size=4, dtype="bfloat16", kv_cache_memory_bytes=16 << 30)
    made = defaults.engine_config(flags, family, cfg, make_mesh(4), ("image", "video"), 262_144)
    assert made.num_pages * made.page_size >= made.max_model_len
    assert all(p % 16 == 0 for p in made.patch_capacities)
    num_programs = 1 + len(made.patch_capacities) + len(made.token_capacities) * 2
    assert num_programs <= 40


def test_bundled_model_says_what_it_is() -> None:
    made = plan()
    config = launch.server_config(ServeFlags(), made)
    assert config.notice == demo.NOTICE
    assert "tpu-vl serve --model" in demo.NOTICE
    named = launch.server_config(ServeFlags(served_model_name="mine"), made)
    assert named.served_model_names == ("mine",)
    assert any("tokens a step" in line for line in launch.describe(made))
