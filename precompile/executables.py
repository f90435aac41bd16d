"""The store of compiled executables: one sub-folder per key, one digest-verified file per program.

Loading an executable runs code, so a store is opened on a folder that its user made private or
that the operator named, or its files must match a manifest of a given digest. `docs/precompile.md`
describes the layout.
"""

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from tpu_vl.precompile import key as keys
from tpu_vl.precompile.folder import Folder

log = logging.getLogger(__name__)

READY = "_READY"
"""Name of the marker that a finished precompilation leaves in the store's folder."""

REMEDY = "Run tpu-vl precompile, or serve --precompile-only, with the same version and flags"
"""What to do where a program is missing or cannot be used."""

_DIGEST_BYTES = 32
_KEY_FILE = "key.json"
_MANIFEST_FILE = "manifest.json"
_SHOWN_DIFFERENCES = 6


class UnusableError(Exception):
    """A stored program that cannot be used; the text says why."""


class AbsentError(UnusableError):
    """The program is not in the store, which is no fault of the store."""


def manifest_digest(key: str, programs: Mapping[str, str]) -> str:
    """The digest that stands for every program of a key.

    Args:
        key: of the store.
        programs: program name -> digest of its file, in hex.
    """
    text = json.dumps({"key": key, "programs": dict(programs)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """Executables of one key in a trusted folder."""

    def __init__(self, folder: Folder, fields: keys.Fields, *, digest: str | None = None) -> None:
        """Args:
        folder: trusted, unless `digest` is given.
        fields: the key fields (`key.key_fields`).
        digest: of the manifest that every file must match; such a store is never written.
        """
        self.folder = folder
        self.fields = fields
        self.key = keys.key_of(fields)
        self._digest = digest
        self._trusted: Mapping[str, str] | None = None
        self._damaged: set[str] = set()
        self._is_written = digest is None
        self._is_claimed = False
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.folder}/{self.key}"

    def open(self) -> None:
        """Checks that the store has this key, and its manifest the given digest.

        Raises:
            UnusableError: it has not; the text names the fields of the nearest key that differ.
        """
        with self._reading():
            if self.folder.read(f"{self.key}/{_KEY_FILE}") is None:
                raise AbsentError(f"{self.folder} has no programs of this key; {self._nearest()}")
            if self._digest is not None:
                self._trusted = self._read_manifest()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnusableError(f"{self} cannot be read ({error})") from error

    def _nearest(self) -> str:
        """What sets the most similar key of the folder apart."""
        found: list[tuple[str, list[str]]] = []
        for name in self.folder.subfolders():
            blob = self.folder.read(f"{name}/{_KEY_FILE}")
            try:
                fields = json.loads(blob) if blob is not None else None
            except ValueError:
                continue
            if isinstance(fields, dict):
                found.append((name, keys.differences(self.fields, fields)))
        if not found:
            return "there is no key in it at all"
        name, parts = min(found, key=lambda f: len(f[1]))
        more = len(parts) - _SHOWN_DIFFERENCES
        text = "; ".join(parts[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        return f"the nearest of {len(found)}, {name}, differs in {text}"

    def _read_manifest(self) -> Mapping[str, str]:
        blob = self.folder.read(f"{self.key}/{_MANIFEST_FILE}")
        try:
            programs = json.loads(blob or b"null")["programs"]
            found = manifest_digest(self.key, programs)
        except (ValueError, TypeError, KeyError) as error:
            raise UnusableError(f"{self}/{_MANIFEST_FILE} is missing or damaged") from error
        if found != self._digest:
            raise UnusableError(
                f"the manifest of {self} has digest {found}, not --executables-digest "
                f"{self._digest}"
            )
        return programs

    def _file(self, name: str) -> str:
        return f"{self.key}/{name.replace('/', '-')}.exe"

    def _file_digest(self, name: str, payload: bytes) -> bytes:
        """Of a file: it holds this program of this key, wherever it was copied from."""
        return hashlib.sha256(f"{self.key}\0{name}\0".encode() + payload).digest()

    def _payload(self, name: str) -> bytes:
        """A program's verified bytes.

        Raises:
            UnusableError: there are none.
        """
        where = f"{self.folder}/{self._file(name)}"
        with self._reading():
            blob = self.folder.read(self._file(name))
        if blob is None:
            raise AbsentError(f"{where} is not there")
        digest, payload = blob[:_DIGEST_BYTES], blob[_DIGEST_BYTES:]
        if self._file_digest(name, payload) != digest:
            self._damaged.add(name)
            raise UnusableError(f"{where} is damaged (digest mismatch)")
        if self._digest is not None and (self._trusted or {}).get(name) != digest.hex():
            raise UnusableError(f"{where} is not the file of --executables-digest {self._digest}")
        return payload

    def check(self, names: Sequence[str]) -> None:
        """Looks for the file of each program, without reading it.

        Raises:
            AbsentError: names the first that is missing.
            UnusableError: the store cannot be read.
        """
        with self._reading():
            for name in names:
                if self._head(name) is None:
                    raise AbsentError(f"{self.folder}/{self._file(name)} is not there")

    def _head(self, name: str) -> bytes | None:
        return self.folder.read(self._file(name), _DIGEST_BYTES)

    def has(self, name: str) -> bool:
        """Whether a program's file is there and whole."""
        try:
            self._payload(name)
        except UnusableError:
            return False
        return True

    def load(self, name: str, in_tree: Any, out_tree: Any, mesh: Mesh) -> jax.stages.Compiled:
        """The stored executable of a program.

        Args:
            name: program name.
            in_tree: tree structure of `(args, kwargs)`.
            out_tree: tree structure of the result.
            mesh: devices to load it on.

        Raises:
            AbsentError: it is not there.
            UnusableError: it is damaged, not trusted, or the runtime refuses it.
        """
        payload = self._payload(name)
        try:
            return serialize_executable.deserialize_and_load(
                payload,
                in_tree,
                out_tree,
                backend=mesh.devices.flat[0].client,
                execution_devices=tuple(mesh.devices.flat),
            )
        except Exception as error:  # whatever a foreign loader raises
            self._damaged.add(name)
            raise UnusableError(
                f"{self.folder}/{self._file(name)} does not load ({error})"
            ) from error

    def claim(self) -> None:
        """Writes what the key stands for, before the first program.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self._is_claimed:
            blob = _json(dict(self.fields))
            self.folder.write(f"{self.key}/{_KEY_FILE}", blob, replace=False)
            self._is_claimed = True

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Writes one executable whole; one that another writer left meanwhile stays.

        Raises:
            OSError: the folder cannot be written.
        """
        payload, _, _ = serialize_executable.serialize(compiled)
        blob = self._file_digest(name, payload) + payload
        self.claim()
        self.folder.write(self._file(name), blob, replace=name in self._damaged)
        self._damaged.discard(name)

    def keep(self, name: str, compiled: jax.stages.Compiled) -> None:
        """As `save`, where it can be written: that it cannot costs one log line for all."""
        self._try(lambda: self.save(name, compiled))

    def keep_manifest(self, names: Sequence[str]) -> None:
        """As `seal`, where it can be written."""
        self._try(lambda: self.seal(names))

    def _try(self, write: Callable[[], object]) -> None:
        if not self._is_written:
            return
        try:
            write()
        except OSError as error:
            with self._lock:  # threads may fail at the same time
                is_first, self._is_written = self._is_written, False
            if is_first:
                log.warning("%s cannot be written (%s): programs are not kept", self, error)

    def seal(self, names: Sequence[str]) -> str:
        """Writes the manifest of these programs from what the store holds now.

        Args:
            names: every program of the key.

        Returns:
            The manifest's digest.

        Raises:
            OSError: a program is missing, or the folder cannot be written.
        """
        programs = {}
        for name in names:
            head = self._head(name)
            if head is None:
                raise FileNotFoundError(f"{self.folder}/{self._file(name)} is not there")
            programs[name] = head.hex()
        digest = manifest_digest(self.key, programs)
        manifest = {"key": self.key, "digest": digest, "programs": programs}
        self.folder.write(f"{self.key}/{_MANIFEST_FILE}", _json(manifest), replace=True)
        return digest

    def mark_ready(self, names: Sequence[str]) -> dict[str, Any]:
        """Seals the store and leaves the marker that readers wait for; returns what it says.

        Raises:
            OSError: as `seal`.
        """
        ready = {"key": self.key, "programs": len(names), "digest": self.seal(names)}
        self.folder.write(READY, _json(ready), replace=True)
        return ready


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
