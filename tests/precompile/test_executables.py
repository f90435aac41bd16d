"""The store of executables: round trip, damage, keys, privacy, several writers, read-only."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_vl.errors import ConfigError
from tpu_vl.mesh import make_mesh, replicated
from tpu_vl.precompile import executables
from tpu_vl.precompile.compile import Progress, compile_all
from tpu_vl.precompile.executables import Store
from tpu_vl.precompile.programs import Program
from tpu_vl.tree import abstract, pytree


@pytree
class State:
    """A tree with a custom node, as the engine's state is one."""

    x_D: jax.Array


def double(state: State, y_D: jax.Array) -> tuple[jax.Array, State]:
    return state.x_D @ state.x_D.T + y_D.sum(), State(x_D=state.x_D * 2 + y_D)


def make_program(name: str = "double", function: Callable[..., Any] = double) -> Program:
    mesh = make_mesh(1)
    array = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=replicated(mesh))
    state = abstract(State, {"D": 4}, jnp.float32, x_D=array)
    return Program(name, function, (state, array), (array, state), (0,), mesh)


def run(
    table: dict[str, jax.stages.Compiled], name: str = "double"
) -> tuple[np.ndarray, np.ndarray]:
    x = jax.device_put(np.arange(16, dtype=np.float32).reshape(4, 4), replicated(make_mesh(1)))
    out, state = table[name](State(x_D=x), np.ones((4, 4), np.float32))
    assert x.is_deleted(), "the donated state must be taken over"
    return np.asarray(out), np.asarray(state.x_D)


def compiled_names(store: Store | None, *programs: Program) -> tuple[dict[str, Any], list[str]]:
    seen: list[Progress] = []
    table = compile_all(programs, store, seen.append)
    assert [p.done for p in seen] == list(range(1, len(programs) + 1))
    return table, [p.name for p in seen if p.compiled]


def test_second_start_compiles_nothing_and_answers_bit_for_bit(tmp_path: Path) -> None:
    store = Store(tmp_path, {"a": 1})
    first, compiled = compiled_names(store, make_program())
    assert compiled == ["double"]
    second, compiled = compiled_names(store, make_program())
    assert compiled == []
    for a, b in zip(run(first), run(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_damage_is_a_recompile_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = Store(tmp_path, {"a": 1})
    compiled_names(store, make_program())
    path = store.path("double")
    blob = bytearray(path.read_bytes())
    if damage == "flip":
        blob[len(blob) // 2] ^= 1
    elif damage == "cut":
        blob = blob[:-7]
    elif damage == "empty":
        blob = bytearray()
    else:  # right digest, wrong content: the loader itself must refuse
        import hashlib

        blob = bytearray(hashlib.sha256(b"not it").digest() + b"not it")
    path.write_bytes(bytes(blob))
    with caplog.at_level(logging.WARNING):
        table, compiled = compiled_names(store, make_program())
    assert compiled == ["double"]
    assert len(caplog.records) == 1
    run(table)
    assert compiled_names(store, make_program())[1] == [], "the damaged file was replaced"


def test_every_field_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, configs = make_mesh(1), {"model": ("m", 1), "engine": ("e", 2)}
    fields = executables.key_fields(mesh, configs)
    key = executables.key_of(fields)
    assert key == executables.key_of(executables.key_fields(mesh, configs))
    for name in fields:
        assert executables.key_of({**fields, name: "other"}) != key, name
    for name in ("jax", "jaxlib", "runtime", "xla_flags", "cpu", "sources", "model", "engine"):
        assert name in fields
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_use_enhanced_launch_barrier=true")
    assert executables.key_of(executables.key_fields(mesh, configs)) == key
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_other=1")
    assert executables.key_of(executables.key_fields(mesh, configs)) != key
    assert executables.key_fields(make_mesh(2), configs)["devices"] == [0, 1]


def test_sources_change_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = executables.source_digest((tmp_path,))
    (tmp_path / "a.py").write_text("x = 2")
    assert executables.source_digest((tmp_path,)) != before


def test_the_real_sources_are_found() -> None:
    roots = executables._source_roots(Path(executables.__file__).resolve().parents[1])
    for root in roots:
        assert any(root.rglob("*.py")), root


def test_folder_of_others_is_refused(tmp_path: Path) -> None:
    executables.make_private(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    os.chmod(tmp_path / "new", 0o777)
    with pytest.raises(ConfigError, match="--executables"):
        executables.make_private(tmp_path / "new")


def test_several_writers_leave_whole_files(tmp_path: Path) -> None:
    store = Store(tmp_path, {"a": 1})
    table, _ = compiled_names(None, make_program())
    writers = [
        threading.Thread(target=store.save, args=("double", table["double"])) for _ in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert compiled_names(store, make_program())[1] == []
    assert sorted(p.name for p in store.key_folder.iterdir()) == ["double.exe", "key.json"]


def test_unwritable_store_costs_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file", {"a": 1})
    with caplog.at_level(logging.WARNING):
        table, compiled = compiled_names(store, make_program())
    assert compiled == ["double"]
    assert "is not kept" in caplog.text
    run(table)
