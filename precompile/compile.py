"""Turns the list of programs into the table of executables, from the store or by compiling."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import jax

from tpu_vl.errors import ConfigError
from tpu_vl.precompile.executables import Store
from tpu_vl.precompile.programs import Program

log = logging.getLogger(__name__)

Executables = dict[str, jax.stages.Compiled]


@dataclass(frozen=True)
class Progress:
    """One finished program: what a progress bar or a log line shows.

    Args:
        name: program.
        done, total: programs finished and in all.
        seconds: spent on this one.
        compiled: False where it came from the store.
        remaining_s: estimate for the rest, from the mean so far.
    """

    name: str
    done: int
    total: int
    seconds: float
    compiled: bool
    remaining_s: float


def compile_program(program: Program) -> jax.stages.Compiled:
    """Traces, lowers and compiles one program for the devices of its arguments' shardings."""
    jitted = jax.jit(
        program.function,
        donate_argnums=program.donate,
        out_shardings=jax.tree.map(lambda a: a.sharding, program.outputs),
    )
    return jitted.lower(*program.arguments).compile()


def _load_or_compile(program: Program, store: Store | None) -> tuple[jax.stages.Compiled, bool]:
    if store is not None:
        in_tree = jax.tree.structure((program.arguments, {}))
        out_tree = jax.tree.structure(program.outputs)
        loaded = store.load(program.name, in_tree, out_tree, program.mesh)
        if loaded is not None:
            return loaded, False
    compiled = compile_program(program)
    if store is not None:
        store.save(program.name, compiled)
    return compiled, True


def compile_all(
    programs: Sequence[Program],
    store: Store | None,
    progress: Callable[[Progress], None],
    *,
    num_threads: int | None = None,
    stop: threading.Event | None = None,
) -> Executables:
    """Every program's executable, ready to be called.

    Args:
        programs: the list, names unique.
        store: where executables are kept; None keeps none.
        progress: called once per finished program, in the calling thread.
        num_threads: compilations at once; None: one per processor, at most 8.
        stop: when set, no further program is started.

    Raises:
        ConfigError: `stop` was set before the last program was started.
    """
    started = time.monotonic()
    table: Executables = {}

    def run(program: Program) -> tuple[str, jax.stages.Compiled, bool, float]:
        if stop is not None and stop.is_set():
            raise ConfigError("compilation was stopped before it ended")
        begun = time.monotonic()
        executable, compiled = _load_or_compile(program, store)
        return program.name, executable, compiled, time.monotonic() - begun

    with ThreadPoolExecutor(num_threads or min(8, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(run, p) for p in programs]
        for future in as_completed(futures):
            name, executable, compiled, seconds = future.result()
            table[name] = executable
            done, total = len(table), len(programs)
            remaining_s = (time.monotonic() - started) / done * (total - done)
            progress(Progress(name, done, total, seconds, compiled, remaining_s))
    return table
