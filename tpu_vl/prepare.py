"""The executables of a sized model: opened, loaded, compiled and kept as the flags ask."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpu_vl.errors import ConfigError
from tpu_vl.flags import ServeFlags
from tpu_vl.precompile.compile import Executables, Progress, compile_all, store_all
from tpu_vl.precompile.executables import REMEDY, AbsentError, Store, UnusableError
from tpu_vl.precompile.folder import (
    Folder,
    LocalFolder,
    default_folder,
    open_folder,
    others_can_write,
)
from tpu_vl.precompile.key import Fields, key_fields
from tpu_vl.precompile.programs import make_backend
from tpu_vl.progress import Bar
from tpu_vl.sized import SizedModel, compile_seconds, list_programs

log = logging.getLogger(__name__)

Report = Callable[[str, int, int], None]


def fields_of(model: SizedModel) -> Fields:
    """The key fields of a model's executables."""
    backend = make_backend(model.mesh, model.engine_config)
    configs = {
        "family": model.family.name,
        "model": model.cfg,
        "engine": model.engine_config,
        "implementations": [backend.vision_attention, backend.paged_attention],
    }
    return key_fields(model.mesh, configs)


def open_store(model: SizedModel, flags: ServeFlags) -> Store | None:
    """The store that a server loads from, checked before a weight is read.

    Args:
        model: what will run.
        flags: `executables`, `executables_digest` and `require_executables`.

    Returns:
        None where the digest that was given is not that of the store: nothing of it is loaded.

    Raises:
        ConfigError: programs are required and not there; names the field of the key that differs.
    """
    store = Store(
        _trusted_folder(flags.executables, has_digest=flags.executables_digest is not None),
        fields_of(model),
        digest=flags.executables_digest,
    )
    try:
        store.open()
        if flags.require_executables:
            store.check([p.name for p in list_programs(model)])
    except UnusableError as reason:
        if flags.require_executables:
            raise ConfigError(f"--require-executables: {reason}. {REMEDY}") from reason
        is_first_start = isinstance(reason, AbsentError) and flags.executables_digest is None
        level = logging.INFO if is_first_start else logging.WARNING
        log.log(level, "%s: compiling every program", reason)
        return None if flags.executables_digest is not None else store
    return store


def _trusted_folder(address: str | None, *, has_digest: bool) -> Folder:
    """The folder that the operator named, or the user's private one."""
    if address is None:
        return default_folder()
    folder = open_folder(address)
    if isinstance(folder, LocalFolder) and not has_digest and others_can_write(Path(str(folder))):
        log.warning(
            "other users can write into %s, and loading executables runs code: chmod go-w, or "
            "give --executables-digest",
            folder,
        )
    return folder


def make_executables(
    model: SizedModel, store: Store | None, report: Report, *, may_compile: bool
) -> Executables:
    """The table of executables, from the store where they are kept, else compiled.

    Args:
        model: what will run.
        store: `open_store(...)`.
        report: told of each finished program.
        may_compile: False raises where one is missing.
    """
    listed = list_programs(model)
    log.info("%d programs, kept in %s", len(listed), "nothing" if store is None else store)
    progress = _Progress(report, len(listed))
    table = compile_all(
        listed, store, progress, may_compile=may_compile, expected_s=compile_seconds(model)
    )
    log.info("%d programs ready, %d of them compiled now", len(table), progress.num_compiled)
    if store is not None and progress.num_compiled:
        store.keep_manifest(list(table))
    return table


def precompile(model: SizedModel, address: str | None) -> dict[str, Any]:
    """Compiles every program of a model into a store and leaves the marker `_READY`.

    Args:
        model: on real or described devices.
        address: folder or gs:// address; None: the user's private folder.

    Returns:
        What the marker says: the key, the number of programs and the manifest's digest.

    Raises:
        ConfigError: the store cannot be written.
    """
    listed = list_programs(model)
    store = Store(default_folder() if address is None else open_folder(address), fields_of(model))
    log.info("%d programs go to %s", len(listed), store)
    progress = _Progress(lambda *_: None, len(listed))
    try:
        store.claim()  # a folder that cannot be written is found out before minutes of compiling
        store_all(listed, store, progress, expected_s=compile_seconds(model))
        ready = store.mark_ready([p.name for p in listed])
    except OSError as error:
        raise ConfigError(f"{store} cannot be written ({error}): name another folder") from error
    log.info("%d programs ready, %d of them compiled now", len(listed), progress.num_compiled)
    return ready


class _Progress:
    """Shows each finished program and counts those that were compiled."""

    def __init__(self, report: Report, num_programs: int) -> None:
        self._report = report
        self._bar = Bar("programs")
        self.num_compiled = 0
        report("programs", 0, num_programs)

    def __call__(self, p: Progress) -> None:
        self.num_compiled += p.compiled
        what = "compiled" if p.compiled else "loaded"
        text = f"{p.name} {what} in {p.seconds:.1f} s, about {p.remaining_s:.0f} s left"
        self._bar.show(p.done, p.total, text)
        self._report("programs", p.done, p.total)
