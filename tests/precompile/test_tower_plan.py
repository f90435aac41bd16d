"""The tower's mode and the size of its slices, by estimate."""

import dataclasses

import pytest

from tests import tpu_compile
from tests.precompile.named import config_of, model_on
from tpu_vl import defaults
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.models.qwen3_vl import FAMILY
from tpu_vl.precompile import tower_plan
from tpu_vl.precompile.estimate import TowerMode, TowerSizes, tower_layer_seconds
from tpu_vl.vision.pack import FramePlan, layer_cost, pack_frames

PROCESSOR = defaults.PUBLISHED_PROCESSOR
CFG = FAMILY.parse_config(config_of("qwen3_vl_8b"))
TOWER = TowerSizes.of(FAMILY.dims(CFG)["vision"], FAMILY.geometry(CFG).num_levels)


def choose(wanted: str = "auto", **changes: object) -> TowerMode:
    values = {
        "tower": TOWER,
        "tower_bytes": 1_150_000_000,
        "processor": PROCESSOR,
        "chip": CHIPS["v6e"],
        "num_devices": 4,
        "max_frame_patches": 65_536,
    }
    return tower_plan.choose_mode(wanted, **{**values, **changes})  # pyright: ignore[reportArgumentType]


def test_the_faster_mode_is_taken_where_it_fits() -> None:
    small = dataclasses.replace(
        PROCESSOR, image_max_pixels=256 * 32 * 32, video_max_pixels=64 * 32 * 32
    )
    assert choose() == "weights", "large pictures: attention is worth splitting"
    assert choose(processor=small) == "data", "small ones: collectives cost more than they save"
    assert choose(processor=small, tower_bytes=5_000_000_000) == "weights", "too large to copy"
    assert choose(processor=small, chip=None) == "weights", "no estimate"


def test_the_operator_decides_where_the_heads_divide() -> None:
    assert choose("data") == "data"
    assert choose("weights") == "weights"
    assert choose("data", num_devices=1) == "weights", "one device is both"
    assert choose("weights", num_devices=3) == "data", "16 heads over 3 devices"


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("mode", ["weights", "data"])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_slice_keeps_to_its_time_by_the_estimate(chip, mode: TowerMode, num_devices: int) -> None:
    work = tower_plan.step_work(
        TOWER, chip, num_devices, mode, max_step_ms=20, row_block=1_024, patch_layers_per_s=0
    )
    bins = num_devices if mode == "data" else 1
    for count, side in ((1, 256), (1, 128), (4, 64), (16, 32), (1, 32), (12, 50), (2, 180)):
        frames = [FramePlan(key=i, grid_h=side, grid_w=side) for i in range(count)]
        (call,) = pack_frames(frames, (65_536 * bins,), bins)
        layers = int(work.patch_layers // layer_cost(call, work.attention_patches))
        layer_s = tower_layer_seconds(TOWER, call.num_patches, count, chip, num_devices, mode)
        assert layers * layer_s <= 20e-3 * 1.01
        # No slice is needlessly short either: one more layer would not fit.
        assert count * side**2 < 2_048 or (layers + 1) * layer_s > 20e-3 * 0.85


def test_half_the_time_is_half_the_work_and_the_limit_is_never_zero() -> None:
    def work(max_step_ms: float, chip_name: str | None = "v6e") -> tower_plan.StepWork:
        chip = CHIPS[chip_name] if chip_name else None
        return tower_plan.step_work(
            TOWER, chip, 4, "weights",
            max_step_ms=max_step_ms, row_block=1_024, patch_layers_per_s=1e6,
        )  # fmt: skip

    assert work(20).patch_layers == pytest.approx(2 * work(10).patch_layers, rel=0.01)
    assert work(20, None).patch_layers == 20_000
    assert work(1e-9).patch_layers == 1
    # Without an estimate attention counts by its operations: 2 * width + mlp for one frame.
    assert work(20, None).attention_patches == 2 * TOWER.width + TOWER.mlp_width


def test_the_flag_reaches_the_engine() -> None:
    def step(**flags: float) -> int:
        model = model_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4, **flags)
        return model.engine_config.vision_step_patch_layers

    assert step(max_vision_step_ms=5.0) == pytest.approx(step() / 4, rel=0.01)


LOWER = """
from tests.precompile.named import bundled_on
from tpu_vl.precompile.compile import lower_program
from tpu_vl.precompile.targets import describe_devices
from tpu_vl.sized import list_programs

model = bundled_on("v6e:2x2", describe_devices, mm_encoder_tp_mode="data", tensor_parallel_size=2)
assert model.cfg.vision.num_bins == 2
smallest = next(p for p in list_programs(model) if p.name.startswith("encode/"))
print(lower_program(smallest).as_text().count("tpu_custom_call"))
"""


@pytest.mark.skipif(not tpu_compile.have_libtpu(), reason="libtpu is not installed")
def test_data_mode_lowers_the_tpu_kernel_inside_each_device() -> None:
    assert tpu_compile.run_script(LOWER).split() == ["1"]
