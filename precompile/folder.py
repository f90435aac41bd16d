"""A folder of small files, on a local disk or behind an fsspec address such as gs://.

A file appears whole or not at all, whoever else writes at the same time.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

from tpu_vl.errors import ConfigError

# Written by one user and read by others; the folder above says who may enter.
_FILE_MODE = 0o644


class Folder(Protocol):
    """What the store needs of a folder; names may hold one `/`."""

    def __str__(self) -> str: ...

    def read(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """A file's first bytes, all of them for None; None where there is no such file.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def write(self, name: str, blob: bytes, *, replace: bool) -> None:
        """Writes a file whole. With `replace` False one that is there already stays.

        Raises:
            OSError: the folder cannot be written.
        """
        ...

    def subfolders(self) -> list[str]:
        """Names of the folders inside; [] where this one does not exist.

        Raises:
            OSError: it cannot be listed.
        """
        ...


class LocalFolder:
    """A folder of this machine, made with its parents when it is written to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """See `Folder.read`."""
        try:
            with open(self._path / name, "rb") as file:
                return file.read() if num_bytes is None else file.read(num_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, blob: bytes, *, replace: bool) -> None:
        """See `Folder.write`."""
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(blob)
            os.chmod(temporary, _FILE_MODE)
            if replace or not _link(temporary, path):
                os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def subfolders(self) -> list[str]:
        """See `Folder.subfolders`."""
        if not self._path.is_dir():
            return []
        return sorted(p.name for p in self._path.iterdir() if p.is_dir())


def _link(source: str, path: Path) -> bool:
    """Gives a file a second name if that is free; False where the disk has no such links."""
    try:
        os.link(source, path)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


class RemoteFolder:
    """A folder behind an fsspec address; object stores write an object whole or not at all."""

    def __init__(self, address: str) -> None:
        """Args:
        address: such as gs://bucket/folder.

        Raises:
            ConfigError: no such kind of address, or its package is not installed.
        """
        self._address = address.rstrip("/")
        try:
            system, root = fsspec.url_to_fs(self._address)
        except ImportError as error:
            raise ConfigError(
                f"{address}: {error}; for gs:// addresses: pip install 'tpu-vl[gcs]'"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{address} is no address of a folder: {error}") from error
        self._system: Any = system
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self._address

    def read(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """See `Folder.read`."""
        try:
            with _as_os_error():
                return self._system.cat_file(f"{self._root}/{name}", end=num_bytes)
        except FileNotFoundError:
            return None

    def write(self, name: str, blob: bytes, *, replace: bool) -> None:
        """See `Folder.write`; two writers that begin at the same moment may both write."""
        path = f"{self._root}/{name}"
        with _as_os_error():
            self._system.invalidate_cache()
            if replace or not self._system.exists(path):
                self._system.pipe_file(path, blob)

    def subfolders(self) -> list[str]:
        """See `Folder.subfolders`."""
        try:
            with _as_os_error():
                self._system.invalidate_cache()
                entries = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        folders = [e["name"].rstrip("/") for e in entries if e["type"] == "directory"]
        return sorted(name.rpartition("/")[2] for name in folders)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Makes what a remote file system raises, of whatever type, an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_folder(address: str) -> Folder:
    """The folder of a path or an address with a scheme, such as gs://bucket/folder."""
    path = address.removeprefix("file://")
    return RemoteFolder(path) if "://" in path else LocalFolder(Path(path).expanduser())


def default_folder() -> Folder:
    """The per-user cache, made private: `$TPU_VL_CACHE`, else `$XDG_CACHE_HOME`, else `~/.cache`.

    Raises:
        ConfigError: it belongs to another user, or others may write into it.
    """
    if root := os.environ.get("TPU_VL_CACHE"):
        path = Path(root) / "executables"
    else:
        cache = os.environ.get("XDG_CACHE_HOME")
        path = (Path(cache) if cache else Path.home() / ".cache") / "tpu-vl" / "executables"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_private(path):
        raise ConfigError(
            f"the folder {path} can be written by other users, and loading executables runs code: "
            "make it yours alone (chmod 700), or name a folder that you trust with --executables"
        )
    return LocalFolder(path)


def is_private(path: Path) -> bool:
    """Whether this user owns a folder and nobody else can write into it."""
    return path.stat().st_uid == os.getuid() and not others_can_write(path)


def others_can_write(path: Path) -> bool:
    """Whether a folder exists and users beside its owner can write into it."""
    return path.is_dir() and bool(path.stat().st_mode & 0o022)
