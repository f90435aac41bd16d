"""Programs of one kernel each, by name, compiled and profiled many to a process.

What was found is kept in the folder that TPU_VL_BENCH_STORE names, if any, under a digest of the
lowered program and of the compiler: a run that was cut short goes on, and a change of one kernel
compiles only what it changes.
"""

import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jax

from bench import schedule, tpu_compiler
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.mesh import make_mesh, replicated

STORE = "TPU_VL_BENCH_STORE"
COMPILE, CYCLES, NAMES = "compile", "cycles", "names"  # what is asked of the compiler
BATCH = 12  # programs of one process: its start costs seconds
_T = TypeVar("_T")
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
        scopes_kept: the schedule is that of the program with the named scopes, of up to 4 % more
            cycles.
    """

    kernel: schedule.KernelProfile
    around_cycles: int
    scopes_kept: bool


def profile_each(
    programs: Sequence[Program], chip: str, *, quick: bool = False
) -> list[Profile | str]:
    """The profile of each program, or the first line of why it does not compile.

    Args:
        programs: equal ones are compiled once.
        chip: its name.
        quick: one compile, with the named scopes kept, instead of two: half the time, for cycles
            that are up to 4 % too many. So too where the compiler, without the scopes, made
            other branches of the program.
    """

    def profiles(batch: list[Program]) -> list[Profile | str]:
        named = _compile(batch, chip, NAMES)
        timed = named if quick else _compile(batch, chip, CYCLES)
        return [_join(*words) for words in zip(timed, named, strict=True)]

    return _in_batches(programs, profiles, chip)


def failures(programs: Sequence[Program], chip: str) -> list[str]:
    """Why each program does not compile; empty where it does. Equal programs compile once."""
    return _in_batches(
        programs, lambda batch: [w["failure"] for w in _compile(batch, chip, COMPILE)], chip
    )


def _in_batches(
    programs: Sequence[Program], found_of: Callable[[list[Program]], list[_T]], chip: str
) -> list[_T]:
    keys = [json.dumps([p.build, p.sizes], sort_keys=True) for p in programs]
    different = dict(zip(keys, programs, strict=True))
    names, found = list(different), dict[str, _T]()
    for at in range(0, len(names), BATCH):
        batch = names[at : at + BATCH]
        found |= zip(batch, found_of([different[name] for name in batch]), strict=True)
        print(f"{chip}: {len(found)} of {len(different)} programs", file=sys.stderr, flush=True)
    return [found[key] for key in keys]


def _join(timed: dict[str, Any], named: dict[str, Any]) -> Profile | str:
    if timed["failure"] or named["failure"]:
        return timed["failure"] or named["failure"]
    kernel, names = (schedule.from_json(words["kernel"]) for words in (timed, named))
    try:
        kernel, scopes_kept = schedule.with_labels(kernel, names), timed is named
    except ValueError:  # of the two programs one has regions that the other has not
        kernel, scopes_kept = names, True
    return Profile(kernel, timed["around_cycles"], scopes_kept)


def _compile(programs: list[Program], chip: str, mode: str) -> list[dict[str, Any]]:
    asked = json.dumps([[p.build, p.sizes] for p in programs])
    with TemporaryDirectory() as folder:
        flags = "" if mode == COMPILE else schedule.dump_flags(Path(folder))
        if mode == NAMES:
            flags += f" {schedule.SCOPES_FLAG}"
        written = tpu_compiler.run(
            _SOURCE, chip, mode, folder, asked, flags=flags, timeout_s=300 * len(programs)
        )
    return json.loads(written.splitlines()[-1])


def compile_in_this_process() -> None:
    """Compiles the programs of sys.argv and prints what came of each."""
    chip, mode, folder, asked = *sys.argv[1:3], Path(sys.argv[3]), json.loads(sys.argv[4])
    # Paths and line numbers would tell equal programs apart; named scopes stay.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    device = tpu_compiler.device(tpu_compiler.TOPOLOGIES[chip])
    said = []
    for build, sizes in asked:
        try:
            module, _, function = build.partition(".")
            builder = getattr(importlib.import_module(f"bench.{module}"), function)
            lowered = lower(builder(CHIPS[chip], **sizes), device)
            said.append(_stored(lowered, chip, mode, folder))
        except (ValueError, NotImplementedError) as error:
            said.append(_refused(error))
    print(json.dumps(said))


def _refused(error: Exception) -> dict[str, Any]:
    return {"failure": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _stored(lowered: jax.stages.Lowered, chip: str, mode: str, folder: Path) -> dict[str, Any]:
    """What came of a program: from the store, else from the compiler."""
    if STORE not in os.environ:
        return _words(lowered, chip, mode, folder)
    reader = Path(schedule.__file__).read_text()
    parts = (lowered.as_text(), chip, importlib.metadata.version("libtpu"), reader)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    store = Path(os.environ[STORE])
    modes = (COMPILE, CYCLES) if mode == COMPILE else (mode,)
    for path in (store / f"{digest}.{name}.json" for name in modes):
        if path.exists():
            return json.loads(path.read_text())
    words = _words(lowered, chip, mode, folder)
    store.mkdir(parents=True, exist_ok=True)
    partial = store / f"{digest}.{mode}.{os.getpid()}"
    partial.write_text(json.dumps(words))
    partial.rename(store / f"{digest}.{mode}.json")
    return words


def _words(lowered: jax.stages.Lowered, chip: str, mode: str, folder: Path) -> dict[str, Any]:
    try:
        try:
            compiled = lowered.compile()
        except Exception as error:  # of XLA or of Mosaic, whose has no public name
            return _refused(error)
        words: dict[str, Any] = {"failure": ""}
        if mode != COMPILE:
            (dump,) = schedule.find_kernels(folder)
            words["kernel"] = schedule.to_json(schedule.read_kernel(dump, CHIPS[chip]))
            text = compiled.as_text() or ""
            words["around_cycles"] = sum(int(x) for x in _FUSION_CYCLES.findall(text))
        return words
    finally:  # the next program's dump is to be the only one
        for path in folder.iterdir():
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
