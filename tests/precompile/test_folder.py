"""Folders of the store: local and remote behave alike; the default one is private."""

import os
import sys
import uuid
from pathlib import Path

import pytest

from tpu_vl.errors import ConfigError
from tpu_vl.precompile import folder as folders
from tpu_vl.precompile.folder import Folder, open_folder


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder, not made yet."""
    if request.param == "local":
        return open_folder(str(tmp_path / "store"))
    return open_folder(f"memory://{uuid.uuid4().hex}/store/")


def test_files_come_back(folder: Folder) -> None:
    assert folder.read("a/x") is None
    assert folder.subfolders() == []
    folder.write("a/x", b"hello", replace=False)
    folder.write("b/y", b"", replace=True)
    folder.write("_READY", b"1", replace=True)
    assert folder.read("a/x") == b"hello"
    assert folder.read("a/x", 2) == b"he"
    assert folder.read("b/y") == b""
    assert folder.subfolders() == ["a", "b"]


def test_a_file_stays_unless_it_is_to_be_replaced(folder: Folder) -> None:
    folder.write("a/x", b"first", replace=False)
    folder.write("a/x", b"second", replace=False)
    assert folder.read("a/x") == b"first"
    folder.write("a/x", b"third", replace=True)
    assert folder.read("a/x") == b"third"


def test_local_writing_leaves_nothing_else(tmp_path: Path) -> None:
    local = open_folder(str(tmp_path))
    for replace in (False, False, True):
        local.write("a/x", b"1", replace=replace)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x"]
    assert (tmp_path / "a" / "x").stat().st_mode & 0o777 == 0o644


def test_a_file_address_is_a_local_folder(tmp_path: Path) -> None:
    open_folder(f"file://{tmp_path}").write("a/x", b"1", replace=False)
    assert (tmp_path / "a" / "x").read_bytes() == b"1"


def test_disks_without_hard_links_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    local = open_folder(str(tmp_path))
    local.write("a/x", b"1", replace=False)
    assert local.read("a/x") == b"1"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x"]


def test_unwritable_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    local = open_folder(str(tmp_path / "file"))
    assert local.read("a/x") is None
    with pytest.raises(OSError, match="file"):
        local.write("a/x", b"1", replace=True)


def test_whatever_a_remote_system_raises_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = open_folder("memory://failing")
    assert isinstance(remote, folders.RemoteFolder)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials")

    for name in ("cat_file", "pipe_file", "ls"):
        monkeypatch.setattr(type(remote._system), name, fail)
    with pytest.raises(OSError, match="RuntimeError: no credentials"):
        remote.read("x")
    with pytest.raises(OSError, match="no credentials"):
        remote.write("x", b"", replace=True)
    with pytest.raises(OSError, match="no credentials"):
        remote.subfolders()


def test_an_address_that_cannot_be_opened_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="nosuch://x"):
        open_folder("nosuch://x/y")
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # importing it fails from now on
    with pytest.raises(ConfigError, match=r"pip install 'tpu-vl\[gcs\]'"):
        open_folder("gs://bucket/folder")


def test_default_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_VL_CACHE", str(tmp_path))
    path = Path(str(folders.default_folder()))
    assert path == tmp_path / "executables"
    assert path.stat().st_mode & 0o777 == 0o700
    os.chmod(path, 0o722)
    with pytest.raises(ConfigError, match="chmod 700"):
        folders.default_folder()
    monkeypatch.delenv("TPU_VL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert str(folders.default_folder()).startswith(str(tmp_path / "xdg" / "tpu-vl"))
