"""Models on devices that are only named: sizes of real checkpoints without a TPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpu_vl import planning, sized
from tpu_vl.checkpoint import Checkpoint, open_checkpoint
from tpu_vl.flags import SizeFlags
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile.targets import Target, parse_target
from tpu_vl.sized import SizedModel

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def checkpoint_of(name: str) -> Checkpoint:
    """A checkpoint of which only config.json exists."""
    return open_checkpoint(str(CONFIGS / f"{name}.json"), configs_only=True)


def config_of(name: str) -> dict[str, Any]:
    """A published config.json."""
    return json.loads((CONFIGS / f"{name}.json").read_text())


def model_on(name: str, target: str, **flags: Any) -> SizedModel:
    """A published model, sized for named TPUs."""
    return _sized(checkpoint_of(name), target, planning.name_devices, flags)


def bundled_on(
    target: str, describe: Callable[[Target], list[Any]] | None, **flags: Any
) -> SizedModel:
    """The bundled model, sized for the devices that `describe` gives, or for named ones."""
    checkpoint = open_checkpoint(None, configs_only=True)
    return _sized(checkpoint, target, describe or planning.name_devices, flags)


def _sized(
    checkpoint: Checkpoint,
    target: str,
    describe: Callable[[Target], list[Any]],
    values: dict[str, Any],
) -> SizedModel:
    flags = SizeFlags(**values)
    mesh = make_mesh(flags.tensor_parallel_size, describe(parse_target(target)))
    return sized.size_model(flags, checkpoint, mesh)
