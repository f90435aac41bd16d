"""How a tower runs on so many devices, by estimate: its mode, and how much of it fits in a step."""

import logging
from dataclasses import dataclass

from tpu_vl.config import ProcessorConfig
from tpu_vl.kernels.chips import Chip
from tpu_vl.precompile import traffic
from tpu_vl.precompile.buckets import grid_of
from tpu_vl.precompile.estimate import TowerMode, TowerSizes, tower_layer_seconds, tower_seconds

log = logging.getLogger(__name__)

WHOLE_TOWER_SHARE = 1 / 8
"""Of a device's memory, that a whole tower may take in "data" mode where the mode is free."""

_LARGE_FRAME = 65_536


def choose_mode(
    wanted: str,
    tower: TowerSizes,
    tower_bytes: int,
    processor: ProcessorConfig,
    chip: Chip | None,
    num_devices: int,
    max_frame_patches: int,
) -> TowerMode:
    """The tower's mode: as asked for where the heads divide; else the faster that fits.

    "auto" compares the estimated time of the stated mix of media, each medium alone in its call.

    Args:
        wanted: "auto", "weights" or "data".
        tower: sizes.
        tower_bytes: of all its weights.
        processor: sizes the media.
        chip: None: no estimate, "weights".
        num_devices: on the "model" axis.
        max_frame_patches: the largest frame.
    """
    if wanted == "data" or num_devices == 1:
        return "data" if num_devices > 1 else "weights"
    if tower.num_heads % num_devices:
        log.warning(
            "the %d heads of the vision tower do not divide over %d devices: every device gets "
            "the whole tower and encodes frames of its own (--mm-encoder-tp-mode data)",
            tower.num_heads,
            num_devices,
        )
        return "data"
    if wanted == "weights" or chip is None or tower_bytes > chip.hbm_bytes * WHOLE_TOWER_SHARE:
        return "weights"
    seconds = {"weights": 0.0, "data": 0.0}
    for sent in traffic.MIXED:
        t, h, w = grid_of(sent, processor, max_frame_patches)
        for mode in ("weights", "data"):
            time_s = tower_seconds(tower, t * h * w, t, chip, num_devices, mode)
            seconds[mode] += sent.weight * time_s
    return "weights" if seconds["weights"] <= seconds["data"] else "data"


@dataclass(frozen=True)
class StepWork:
    """The tower's work between two decode steps, in the units of `EngineConfig`.

    Args:
        patch_layers: patches times layers that a device may run.
        attention_patches: size of the frame whose attention takes as long as all else.
    """

    patch_layers: int
    attention_patches: int


def step_work(
    tower: TowerSizes,
    chip: Chip | None,
    num_devices: int,
    mode: TowerMode,
    *,
    max_step_ms: float,
    row_block: int,
    patch_layers_per_s: float,
) -> StepWork:
    """What `--max-vision-step-ms` allows.

    Args:
        tower: sizes.
        chip: None: `patch_layers_per_s` is the speed, and attention counts by its operations.
        num_devices: on the "model" axis.
        mode: of the tower.
        max_step_ms: the limit.
        row_block: patches per block of the linear parts.
        patch_layers_per_s: speed of a platform without estimate.
    """
    if chip is None:
        inner = tower.num_heads * tower.head_dim
        linear = 4 * tower.width * inner + tower.mlp_matrices * tower.width * tower.mlp_width
        patches = linear // (2 * inner)
        return StepWork(max(1, int(max_step_ms / 1e3 * patch_layers_per_s)), patches)
    bins = num_devices if mode == "data" else 1
    # Tiny frames leave the linear parts alone; one block at a time reads the weights most often.
    linear_s = tower_layer_seconds(
        tower, bins * row_block, bins * row_block // 64, chip, num_devices, mode, row_block
    )
    linear_s /= row_block
    large_s = tower_layer_seconds(tower, _LARGE_FRAME, 1, chip, num_devices, mode, row_block)
    attention_s = large_s / _LARGE_FRAME - linear_s
    return StepWork(
        patch_layers=max(1, int(max_step_ms / 1e3 / linear_s)),
        attention_patches=max(1, int(_LARGE_FRAME * linear_s / attention_s)),
    )
