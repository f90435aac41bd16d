"""Which store a server opens, and what it says of one that it does not trust or does not find."""

import logging
import re
from pathlib import Path

import pytest

from tpu_vl import launch, prepare
from tpu_vl.errors import ConfigError
from tpu_vl.flags import ServeFlags
from tpu_vl.precompile.executables import Store

PLAN = launch.make_plan(ServeFlags())


def open_store(folder: Path | None, **flags: object) -> Store | None:
    address = None if folder is None else str(folder)
    return prepare.open_store(PLAN, ServeFlags(executables=address, **flags))  # pyright: ignore


def test_a_named_folder_is_trusted_and_one_that_others_write_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mode, warned in ((0o755, False), (0o777, True)):
        tmp_path.chmod(mode)
        store = open_store(tmp_path)
        assert store is not None
        assert str(store) == f"{tmp_path}/{store.key}"
        assert ("other users can write" in caplog.text) == warned


def test_without_a_name_it_is_the_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_VL_CACHE", str(tmp_path))
    store = open_store(None)
    assert str(store).startswith(f"{tmp_path}/executables/")
    (tmp_path / "executables").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        open_store(None)


def test_an_unknown_key_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    store = open_store(tmp_path)
    assert store is not None
    changed = {**store.fields, "jaxlib": "0.0.1"}
    Store(store.folder, changed).claim()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert open_store(tmp_path) is not None
    (line,) = caplog.messages
    assert re.search(r'differs in jaxlib \(here ".*", there "0.0.1"\): compiling every', line)


def test_a_digest_that_fits_nothing_is_one_line_and_no_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert open_store(tmp_path, executables_digest="0" * 64) is None
    assert len(caplog.messages) == 1
    assert "compiling every program" in caplog.text
    with pytest.raises(ConfigError, match="--require-executables"):
        open_store(tmp_path, executables_digest="0" * 64, require_executables=True)
