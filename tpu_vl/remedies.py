"""Flags with which a model that does not fit its devices would, each tried by formula."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from tpu_vl import defaults, planning
from tpu_vl import mesh as meshes
from tpu_vl.checkpoint import Checkpoint
from tpu_vl.config import MediaLimits
from tpu_vl.errors import ConfigError
from tpu_vl.flags import SizeFlags, option_name
from tpu_vl.kernels.chips import chip_of
from tpu_vl.precompile.plan import Plan
from tpu_vl.precompile.targets import MACHINES, Target
from tpu_vl.sized import SizedModel

_SMALLEST = {
    "max_model_len": 2_048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_frame_patches": 4_096,
}
"""Down to where the search lowers a limit."""

Step = tuple[dict[str, Any], Target]
"""Changes of flags, and the slice that they are tried on."""


class DoesNotFitError(ConfigError):
    """The plan does not fit the devices; the message is its table and the flags that would."""


def check_fit(
    model: SizedModel,
    flags: SizeFlags,
    target: Target | None = None,
    request_patches: int = MediaLimits().max_request_patches,
) -> Plan | None:
    """The plan of a model that is about to be loaded or compiled for TPUs; None elsewhere.

    Args:
        model: on real or described devices.
        flags: what decided its sizes.
        target: the slice; None: the devices of this machine.
        request_patches: limit on all media of a request.

    Raises:
        DoesNotFitError: it does not fit.
    """
    if meshes.platform(model.mesh) != "tpu":
        return None
    if target is None:
        devices = model.mesh.devices.flat[0].client.devices()
        target = slice_of(devices[0].device_kind, len(devices))
    plan = planning.plan_of(model, flags, str(target), request_patches)
    if plan.fits:
        return plan
    found = remedies(flags, model.checkpoint, target)
    raise DoesNotFitError(f"{plan.table()}\n\n{remedies_text(found)}")


def slice_of(device_kind: str, count: int) -> Target:
    """The smallest slice of a chip that has so many devices.

    Raises:
        ConfigError: there is none so large.
    """
    chip = chip_of(device_kind).name
    found = [s for s in _slices(chip) if planning.num_devices(s) >= count]
    if not found:
        raise ConfigError(f"no slice of {chip} has {count} devices")
    return found[0]


def remedies(flags: SizeFlags, checkpoint: Checkpoint, target: Target) -> list[str]:
    """Changes of the flags with which the model fits, each tried by formula.

    Args:
        flags: with which it does not fit.
        checkpoint: its JSON files.
        target: the slice.

    Returns:
        More devices of the slice and lower limits, one at a time; where none of these is enough,
        all limits at their lowest, and where that is not, the smallest larger slice.
    """

    def first_fit(ladder: Iterable[Step]) -> Iterator[str]:
        for changes, on in ladder:
            if _does_fit(dataclasses.replace(flags, **changes), checkpoint, on):
                text = " ".join(_option(name, value) for name, value in changes.items())
                yield text if on is target else f"--target {_name(on)} {text}"
                return

    found = [text for ladder in _single_ladders(flags, target) for text in first_fit(ladder)]
    return found or [*first_fit(_last_resorts(flags, target))]


def _single_ladders(flags: SizeFlags, target: Target) -> Iterator[Iterable[Step]]:
    """Ladders of ever larger changes of one flag."""
    most = planning.num_devices(target)
    yield [
        ({"tensor_parallel_size": n}, target)
        for n in range(flags.tensor_parallel_size + 1, most + 1)
    ]
    for name, values in _lower_limits(flags).items():
        yield [({name: value}, target) for value in values]
    yield [({"text_model_only": True}, target)]


def _last_resorts(flags: SizeFlags, target: Target) -> Iterator[Step]:
    lowest = {name: values[-1] for name, values in _lower_limits(flags).items() if values}
    yield lowest, target
    yield lowest | {"tensor_parallel_size": planning.num_devices(target)}, target
    for larger in _slices(target.machine.chip):
        if larger.num_chips > target.num_chips:
            yield {"tensor_parallel_size": planning.num_devices(larger)}, larger


def _lower_limits(flags: SizeFlags) -> dict[str, list[int]]:
    """Halves of each limit, down to the smallest that is tried."""
    tpu = defaults.PLATFORMS["tpu"]
    return {
        name: _halves(getattr(flags, name) or getattr(tpu, name), least)
        for name, least in _SMALLEST.items()
    }


def _halves(value: int, least: int) -> list[int]:
    values = []
    while value // 2 >= least:
        value //= 2
        values.append(value)
    return values


def _slices(chip: str) -> list[Target]:
    """Every slice of a chip, the smallest first."""
    slices = [
        Target(machine=m, topology=t) for m in MACHINES if m.chip == chip for t in m.topologies
    ]
    return sorted(slices, key=lambda s: (s.num_chips, s.num_hosts))


def _does_fit(flags: SizeFlags, checkpoint: Checkpoint, target: Target) -> bool:
    try:
        return planning.does_fit(flags, checkpoint, target)
    except ConfigError:  # heads that do not divide, limits that contradict each other
        return False


def _option(name: str, value: Any) -> str:
    return option_name(name) if value is True else f"{option_name(name)} {value}"


def _name(target: Target) -> str:
    return f"{target.machine.name}:{target.topology}"


def remedies_text(found: list[str]) -> str:
    """The remedies as lines under a table."""
    if not found:
        return "no flag makes it fit on this target, nor on a larger slice of the same chip"
    return "\n".join(["it would fit with one of", *(f"  {line}" for line in found)])
