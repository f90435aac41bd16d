"""Programs of one kernel each, by name, compiled and profiled many to a process."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from bench import schedule, tpu_compiler
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.mesh import make_mesh, replicated

_KEPT = ("packed-bundles-post-ra", "per-bundle-utilization", "final_bundles")
_SOURCE = "from bench import programs; programs.compile_in_this_process()"
_FUSION_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Program:
    """One call of a kernel with the shapes of one device.

    Args:
        build: module and function, as in "rivals.splash_call": gets the chip and `sizes` and
            returns a Call.
        sizes: keyword arguments; JSON values.
    """

    build: str
    sizes: dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """What the compiler says of a program.

    Args:
        kernel: the schedule of its Pallas kernel.
        around_cycles: XLA's estimate of the fusions around it: transposes, padding.
    """

    kernel: schedule.KernelProfile
    around_cycles: int


def profile_each(
    programs: Sequence[Program], chip: str, timeout_s: float = 3600
) -> list[Profile | str]:
    """The profile of each program, or the first line of why it does not compile."""
    if not programs:
        return []
    with TemporaryDirectory() as plain, TemporaryDirectory() as named:
        said, _ = (
            _compile(
                programs, chip, folder, f"{schedule.dump_flags(Path(folder))} {more}", timeout_s
            )
            for folder, more in ((plain, ""), (named, schedule.SCOPES_FLAG))
        )
        found: list[Profile | str] = []
        for index, words in enumerate(said):
            if words["failure"]:
                found.append(words["failure"])
                continue
            (dump,), (names,) = (
                schedule.find_kernels(Path(folder) / str(index)) for folder in (plain, named)
            )
            kernel = schedule.with_labels(
                schedule.read_kernel(dump, CHIPS[chip]), schedule.read_kernel(names, CHIPS[chip])
            )
            found.append(Profile(kernel, words["around_cycles"]))
        return found


def failures(programs: Sequence[Program], chip: str, timeout_s: float = 3600) -> list[str]:
    """Why each program does not compile; empty where it does."""
    with TemporaryDirectory() as folder:
        return [said["failure"] for said in _compile(programs, chip, folder, "", timeout_s)]


def _compile(
    programs: Sequence[Program], chip: str, folder: str, flags: str, timeout_s: float
) -> list[dict[str, Any]]:
    asked = json.dumps([[p.build, p.sizes] for p in programs])
    written = tpu_compiler.run(_SOURCE, chip, folder, asked, flags=flags, timeout_s=timeout_s)
    return json.loads(written.splitlines()[-1])


def compile_in_this_process() -> None:
    """Compiles the programs of sys.argv, keeps their dumps apart, prints what came of each."""
    chip, folder, asked = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    device = tpu_compiler.device(tpu_compiler.TOPOLOGIES[chip])
    said = []
    for index, (build, sizes) in enumerate(asked):
        words = {"failure": "", "around_cycles": 0}
        try:
            module, _, function = build.partition(".")
            builder = getattr(importlib.import_module(f"bench.{module}"), function)
            call = builder(CHIPS[chip], **sizes)
            text = lower(call, device).compile().as_text() or ""
            words["around_cycles"] = sum(int(x) for x in _FUSION_CYCLES.findall(text))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            words["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        _keep(folder, folder / str(index))
        said.append(words)
    print(json.dumps(said))


def _keep(folder: Path, target: Path) -> None:
    """Moves the dumps that are read to a folder of their own and drops the others."""
    target.mkdir()
    for path in folder.iterdir():
        if path.is_file() and any(x in path.name for x in _KEPT) and "DGO" not in path.name:
            path.rename(target / path.name)
        elif path.is_file():
            path.unlink()


@dataclass(frozen=True)
class Call:
    """A function and the shapes it is lowered with."""

    run: Callable[..., Any]
    shapes: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def lower(call: Call, device: Any) -> jax.stages.Lowered:
    """Lowers a call for one described device."""
    mesh = make_mesh(1, [device])
    place = replicated(mesh)
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), call.shapes
    )
    # A kernel's lowering asks what the device is: of the mesh, since a described one is absent.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(call.run, donate_argnums=call.donated).lower(*shapes)
