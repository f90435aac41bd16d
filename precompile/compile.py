"""Turns the list of programs into the table of executables, from the store or by compiling."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import jax

from tpu_vl.errors import ConfigError
from tpu_vl.precompile.executables import REMEDY, AbsentError, Store, UnusableError
from tpu_vl.precompile.programs import Program

log = logging.getLogger(__name__)

T = TypeVar("T")
Executables = dict[str, jax.stages.Compiled]
_EQUAL: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Progress:
    """One finished program: what a progress bar or a log line shows.

    Args:
        name: program.
        done, total: programs finished and in all.
        seconds: spent on this one.
        compiled: False where it came from the store.
        remaining_s: estimate for the rest, from the speed so far.
    """

    name: str
    done: int
    total: int
    seconds: float
    compiled: bool
    remaining_s: float


def lower_program(program: Program) -> jax.stages.Lowered:
    """Traces and lowers one program for the devices of its arguments' shardings."""
    jitted = jax.jit(
        program.function,
        donate_argnums=program.donate,
        out_shardings=jax.tree.map(lambda a: a.sharding, program.outputs),
    )
    # A kernel's lowering asks what the device is: of the mesh, since described ones are absent.
    with jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
        return jitted.lower(*program.arguments)


def compile_program(program: Program) -> jax.stages.Compiled:
    """Lowers and compiles one program; its devices may be described ones."""
    return lower_program(program).compile(compiler_options=dict(program.compiler_options))


def compile_all(
    programs: Sequence[Program],
    store: Store | None,
    progress: Callable[[Progress], None],
    *,
    may_compile: bool = True,
    expected_s: Mapping[str, float] = _EQUAL,
    num_threads: int | None = None,
) -> Executables:
    """Every program's executable, ready to be called.

    Args:
        programs: the list, names unique.
        store: where executables are kept; None keeps none.
        progress: called once per finished program, in the calling thread.
        may_compile: False raises where a program is not in the store.
        expected_s: seconds that each will take, by name: the longest start first, so that none is
            left to compile alone at the end. Without it all count alike.
        num_threads: compilations at once; None: one per processor, at most 8.

    Raises:
        ConfigError: a program would have to be compiled and must not be.
    """

    def work(program: Program) -> tuple[jax.stages.Compiled, bool]:
        if store is not None:
            in_tree = jax.tree.structure((program.arguments, {}))
            out_tree = jax.tree.structure(program.outputs)
            try:
                return store.load(program.name, in_tree, out_tree, program.mesh), False
            except UnusableError as reason:
                if not may_compile:
                    raise ConfigError(f"--require-executables: {reason}. {REMEDY}") from reason
                if not isinstance(reason, AbsentError):
                    log.warning("%s: compiling it", reason)
        compiled = compile_program(program)
        if store is not None:
            store.keep(program.name, compiled)
        return compiled, True

    return _in_threads(programs, work, progress, expected_s, num_threads)


def store_all(
    programs: Sequence[Program],
    store: Store,
    progress: Callable[[Progress], None],
    *,
    expected_s: Mapping[str, float] = _EQUAL,
    num_threads: int | None = None,
) -> None:
    """Compiles into the store what it does not hold yet; the devices may be absent.

    Args:
        programs, progress, expected_s, num_threads: as for `compile_all`.
        store: can be written.

    Raises:
        OSError: the store cannot be written.
    """

    def work(program: Program) -> tuple[None, bool]:
        if store.has(program.name):
            return None, False
        store.save(program.name, compile_program(program))
        return None, True

    _in_threads(programs, work, progress, expected_s, num_threads)


def _in_threads(
    programs: Sequence[Program],
    work: Callable[[Program], tuple[T, bool]],
    progress: Callable[[Progress], None],
    expected_s: Mapping[str, float],
    num_threads: int | None,
) -> dict[str, T]:
    """The result of `work` by program; the first failure lets no further program start."""
    started = time.monotonic()
    results: dict[str, T] = {}
    left = {p.name: expected_s.get(p.name, 1.0) for p in programs}
    whole = sum(left.values())

    def run(program: Program) -> tuple[str, T, bool, float]:
        begun = time.monotonic()
        result, compiled = work(program)
        return program.name, result, compiled, time.monotonic() - begun

    with ThreadPoolExecutor(num_threads or min(8, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(run, p) for p in sorted(programs, key=lambda p: -left[p.name])]
        try:
            for future in as_completed(futures):
                name, result, compiled, seconds = future.result()
                results[name] = result
                del left[name]
                ahead = sum(left.values())
                remaining_s = (time.monotonic() - started) / (whole - ahead) * ahead
                progress(
                    Progress(name, len(results), len(programs), seconds, compiled, remaining_s)
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results
