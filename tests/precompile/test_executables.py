"""The store of executables: round trip, damage, trust, several writers, read-only mounts."""

import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_vl.errors import ConfigError
from tpu_vl.mesh import make_mesh, replicated
from tpu_vl.precompile import compile as compiling
from tpu_vl.precompile.compile import Progress, compile_all, compile_program, store_all
from tpu_vl.precompile.executables import READY, AbsentError, Store, UnusableError
from tpu_vl.precompile.folder import Folder, open_folder
from tpu_vl.precompile.programs import Program
from tpu_vl.tree import abstract, pytree

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"jax": "1", "engine.pages": 3}


@pytree
class State:
    """A tree with a custom node, as the engine's state is one."""

    x_D: jax.Array


def double(state: State, y_D: jax.Array) -> tuple[jax.Array, State]:
    return state.x_D @ state.x_D.T + y_D.sum(), State(x_D=state.x_D * 2 + y_D)


def triple(state: State, y_D: jax.Array) -> tuple[jax.Array, State]:
    return state.x_D @ state.x_D.T + y_D.sum(), State(x_D=state.x_D * 3 + y_D)


def make_program(name: str = "double/1", function: Callable[..., Any] = double) -> Program:
    mesh = make_mesh(1)
    array = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=replicated(mesh))
    state = abstract(State, {"D": 4}, jnp.float32, x_D=array)
    return Program(name, function, (state, array), (array, state), (0,), mesh)


def run(table: dict[str, jax.stages.Compiled], name: str = "double/1") -> list[np.ndarray]:
    noise = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    x = jax.device_put(noise[0], replicated(make_mesh(1)))
    out, state = table[name](State(x_D=x), noise[1])
    assert x.is_deleted(), "the donated state must be taken over"
    return [np.asarray(out), np.asarray(state.x_D)]


def compiled_names(
    store: Store | None, *programs: Program, **options: Any
) -> tuple[dict[str, Any], list[str]]:
    seen: list[Progress] = []
    table = compile_all(programs, store, seen.append, **options)
    assert [p.done for p in seen] == list(range(1, len(programs) + 1))
    return table, [p.name for p in seen if p.compiled]


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder, on disk and behind an fsspec address."""
    if request.param == "local":
        return open_folder(str(tmp_path / "store"))
    return open_folder(f"memory://{uuid.uuid4().hex}")


def test_second_start_compiles_nothing_and_answers_bit_for_bit(folder: Folder) -> None:
    first, compiled = compiled_names(Store(folder, FIELDS), make_program())
    assert compiled == ["double/1"]
    second, compiled = compiled_names(Store(folder, FIELDS), make_program())
    assert compiled == []
    for a, b in zip(run(first), run(second), strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_precompiling_leaves_a_marker_and_skips_what_is_there(folder: Folder) -> None:
    programs = [make_program(n) for n in ("double/1", "double/2")]
    store, seen = Store(folder, FIELDS), list[Progress]()
    store_all(programs[:1], store, seen.append)
    store_all(programs, store, seen.append)
    assert [(p.name, p.compiled) for p in seen if p.name == "double/2"] == [("double/2", True)]
    assert [p.compiled for p in seen if p.name == "double/1"] == [True, False]
    ready = store.mark_ready([p.name for p in programs])
    assert json.loads(folder.read(READY) or b"") == ready
    assert (ready["key"], ready["programs"]) == (store.key, 2)
    trusting = Store(folder, FIELDS, digest=ready["digest"])
    trusting.open()
    assert compiled_names(trusting, *programs)[1] == []


def test_an_unfinished_store_is_not_sealed(folder: Folder) -> None:
    store = Store(folder, FIELDS)
    compiled_names(store, make_program())
    with pytest.raises(FileNotFoundError, match="double-2"):
        store.mark_ready(["double/1", "double/2"])
    assert folder.read(READY) is None


def damaged(blob: bytes, kind: str) -> bytes:
    if kind == "flip":
        middle = len(blob) // 2
        return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]
    return {"cut": blob[:-7], "empty": b"", "head": blob[:20]}[kind]


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "head"])
def test_damage_is_a_recompile_with_one_log_line(
    folder: Folder, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    store = Store(folder, FIELDS)
    compiled_names(store, make_program())
    file = store._file("double/1")
    folder.write(file, damaged(folder.read(file) or b"", kind), replace=True)
    assert not store.has("double/1")
    with pytest.raises(ConfigError, match=r"--require-executables: .*double-1.exe is damaged"):
        compiled_names(Store(folder, FIELDS), make_program(), may_compile=False)
    with caplog.at_level(logging.WARNING):
        table, compiled = compiled_names(Store(folder, FIELDS), make_program())
    assert compiled == ["double/1"]
    assert len(caplog.records) == 1
    run(table)
    assert compiled_names(store, make_program())[1] == [], "the damaged file was replaced"


def test_what_the_runtime_refuses_is_compiled(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(folder, FIELDS)
    payload = b"not an executable"
    blob = store._file_digest("double/1", payload) + payload
    folder.write(store._file("double/1"), blob, replace=True)
    with caplog.at_level(logging.WARNING):
        table, compiled = compiled_names(store, make_program())
    assert compiled == ["double/1"]
    assert [r for r in caplog.messages if "does not load" in r] == caplog.messages
    run(table)
    assert compiled_names(store, make_program())[1] == []


def test_a_file_of_another_key_or_program_is_not_loaded(folder: Folder) -> None:
    other = Store(folder, {**FIELDS, "jax": "2"})
    compiled_names(other, make_program("triple", triple))
    blob = folder.read(other._file("triple")) or b""
    store = Store(folder, FIELDS)
    for target, name in ((store, "triple"), (other, "double/1")):
        folder.write(target._file(name), blob, replace=True)
        with pytest.raises(UnusableError, match="digest mismatch"):
            target.load(name, None, None, make_mesh(1))
    compiled, reference = (compiled_names(s, make_program())[0] for s in (other, None))
    for a, b in zip(run(compiled), run(reference), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_missing_key_names_the_field_that_differs(folder: Folder) -> None:
    store = Store(folder, FIELDS)
    with pytest.raises(AbsentError, match="no key in it at all"):
        store.open()
    for fields in ({"jax": "2", "engine.pages": 4}, {"jax": "1", "engine.pages": 4}):
        compiled_names(Store(folder, fields), make_program())
    with pytest.raises(AbsentError, match=r"nearest of 2, .* differs in engine.pages \(here 3, th"):
        store.open()
    compiled_names(store, make_program())
    store.open()
    store.check(["double/1"])
    with pytest.raises(AbsentError, match="double-2"):
        store.check(["double/1", "double/2"])


def test_many_differences_are_cut_short(folder: Folder) -> None:
    theirs = {f"f{i}": i for i in range(20)}
    compiled_names(Store(folder, theirs), make_program())
    with pytest.raises(AbsentError, match="and 14 more"):
        Store(folder, dict.fromkeys(theirs, -1)).open()


def forge(store: Store, function: Callable[..., Any]) -> None:
    """Puts other code under a program's name, digest and all."""
    store._damaged.add("double/1")
    store.save("double/1", compile_program(make_program(function=function)))


def test_a_digest_refuses_files_that_others_exchanged(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(folder, FIELDS)
    compiled_names(store, make_program())
    digest = store.seal(["double/1"])
    forge(store, triple)
    trusting = Store(folder, FIELDS, digest=digest)
    trusting.open()
    before = folder.read(store._file("double/1"))
    with caplog.at_level(logging.WARNING):
        table, compiled = compiled_names(trusting, make_program())
    assert compiled == ["double/1"]
    assert "is not the file of --executables-digest" in caplog.text
    for a, b in zip(run(table), run(compiled_names(None, make_program())[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert folder.read(store._file("double/1")) == before, "a store of a digest is never written"


def test_a_digest_refuses_a_manifest_that_others_exchanged(folder: Folder) -> None:
    store = Store(folder, FIELDS)
    compiled_names(store, make_program())
    digest = store.seal(["double/1"])
    forge(store, triple)
    forged = store.seal(["double/1"])
    with pytest.raises(UnusableError, match=f"has digest {forged}, not --executables-digest"):
        Store(folder, FIELDS, digest=digest).open()
    for text in (b"", b"{}", b"[]", b"{", b'{"programs": 3}'):
        folder.write(f"{store.key}/manifest.json", text, replace=True)
        with pytest.raises(UnusableError, match="manifest"):
            Store(folder, FIELDS, digest=digest).open()


def test_a_digest_that_was_not_checked_loads_nothing(folder: Folder) -> None:
    store = Store(folder, FIELDS)
    compiled_names(store, make_program())
    unopened = Store(folder, FIELDS, digest=store.seal(["double/1"]))
    assert compiled_names(unopened, make_program())[1] == ["double/1"]


# Each process compiles the same programs into the same folder, many times over.
WRITER = """
import sys
from tests.precompile.test_executables import (
    FIELDS, compile_program, double, make_program, triple
)
from tpu_vl.precompile.executables import Store
from tpu_vl.precompile.folder import open_folder

# The files of the two differ, so that parts of both could be told.
function = {"double": double, "triple": triple}[sys.argv[2]]
programs = [make_program(f"double/{i}", function) for i in range(3)]
compiled = {p.name: compile_program(p) for p in programs}
for round in range(40):
    store = Store(open_folder(sys.argv[1]), FIELDS)
    for name, executable in compiled.items():
        if round % 4 == 0:
            store._damaged.add(name)
        store.save(name, executable)
        assert store.has(name), name
    store.mark_ready(list(compiled))
"""


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_store_that_cannot_be_read_is_unusable(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("gone away")

    monkeypatch.setattr(type(folder), "read", fail)
    store = Store(folder, FIELDS)
    for call in (store.open, lambda: store.check(["double/1"])):
        with pytest.raises(UnusableError, match=r"cannot be read .*gone away"):
            call()
    with caplog.at_level(logging.WARNING):
        assert compiled_names(store, make_program())[1] == ["double/1"]
    assert len(caplog.records) == 1


def test_several_writers_leave_whole_files(tmp_path: Path) -> None:
    writers = [python(WRITER, str(tmp_path), function) for function in ("double", "triple")]
    for writer in writers:
        out, err = writer.communicate(timeout=120)
        assert writer.returncode == 0, out + err
    store = Store(open_folder(str(tmp_path)), FIELDS)
    programs = [make_program(f"double/{i}") for i in range(3)]
    ready = json.loads((tmp_path / READY).read_text())
    trusting = Store(open_folder(str(tmp_path)), FIELDS, digest=ready["digest"])
    trusting.open()
    assert compiled_names(trusting, *programs)[1] == []
    names = [f"double-{i}.exe" for i in range(3)] + ["key.json", "manifest.json"]
    assert sorted(p.name for p in (tmp_path / store.key).iterdir()) == names


# Root writes where the mode forbids it, so the process becomes a user that does not.
READER = """
import json, logging, os, sys
import jax
from tests.precompile.test_executables import FIELDS, compiled_names, make_program, run
from tpu_vl.precompile.executables import Store
from tpu_vl.precompile.folder import open_folder

logging.basicConfig(format="%(message)s", stream=sys.stderr)
jax.devices()
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
store = Store(open_folder(sys.argv[1]), FIELDS)
programs = [make_program(f"double/{i}") for i in (1, 2, 3)]
table, compiled = compiled_names(store, *programs)
store.keep_manifest(list(table))
for name in table:
    run(table, name)
print(json.dumps(compiled))
"""


def test_a_read_only_folder_is_read_and_costs_one_log_line() -> None:
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: only its user may enter that
        path = Path(name)
        store = Store(open_folder(name), FIELDS)
        compiled_names(store, make_program())
        for inner in (path, path / store.key):
            inner.chmod(0o555)
        reader = python(READER, name)
        out, err = reader.communicate(timeout=120)
        for inner in (path, path / store.key):
            inner.chmod(0o755)
        assert reader.returncode == 0, out + err
        assert sorted(json.loads(out)) == ["double/2", "double/3"]
        assert err.count("cannot be written") == 1, err
        assert len(err.splitlines()) == 1, err
        written = sorted(p.name for p in (path / store.key).iterdir())
        assert written == ["double-1.exe", "key.json"]


def test_a_failing_program_stops_the_others() -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("as planned")

    programs = [make_program("broken", broken), *(make_program(f"double/{i}") for i in range(20))]
    seen: list[str] = []
    with pytest.raises(ValueError, match="as planned"):
        compile_all(programs, None, lambda p: seen.append(p.name), num_threads=1)
    assert len(seen) < 20


def test_the_longest_program_starts_first_and_the_rest_is_estimated_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.chain([0.0], itertools.repeat(6.0))
    monkeypatch.setattr(compiling.time, "monotonic", lambda: next(clock))
    started: list[str] = []
    monkeypatch.setattr(compiling, "compile_program", lambda p: started.append(p.name))
    programs = [make_program(f"double/{i}") for i in range(3)]
    left = {"double/0": 1.0, "double/1": 6.0, "double/2": 3.0}
    seen: list[Progress] = []
    compile_all(programs, None, seen.append, expected_s=dict(left), num_threads=1)
    assert started == ["double/1", "double/2", "double/0"]
    for p in seen:
        del left[p.name]
        ahead = sum(left.values())
        assert p.remaining_s == pytest.approx(6.0 / (10.0 - ahead) * ahead)
    started.clear()
    compile_all(programs, None, seen.append, num_threads=1)
    assert started == [p.name for p in programs]


def test_the_digest_of_a_file_is_over_key_name_and_content(folder: Folder) -> None:
    store = Store(folder, FIELDS)
    compiled_names(store, make_program())
    blob = folder.read(store._file("double/1")) or b""
    text = f"{store.key}\0double/1\0".encode()
    assert blob[:32] == hashlib.sha256(text + blob[32:]).digest()
