"""A folder of compiled executables: keyed, digest-verified, private, safe with several writers.

Loading an executable runs code, so a store reads only a folder that its own user made private or
that the operator named. One sub-folder per key holds one file per program; the first 32 bytes of
a file are the SHA-256 of the rest. Whatever does not match is compiled again with one log line.
"""

import hashlib
import json
import logging
import os
import platform as host_platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from tpu_vl.errors import ConfigError

log = logging.getLogger(__name__)

# A TPU host's jax appends this by itself, so it says nothing about the program.
_IGNORED_FLAGS = re.compile(r"^--xla_tpu_use_enhanced_launch_barrier=")


def normalised_flags(text: str) -> tuple[str, ...]:
    """Compiler flags in a fixed order, without those that a host adds by itself."""
    return tuple(sorted(f for f in text.split() if not _IGNORED_FLAGS.match(f)))


def source_digest(roots: tuple[Path, ...]) -> str:
    """SHA-256 over the Python sources under `roots`, names and contents."""
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix().encode()
            body = path.read_bytes()
            digest.update(len(name).to_bytes(8, "little") + name)
            digest.update(len(body).to_bytes(8, "little") + body)
    return digest.hexdigest()


def cpu_features() -> str:
    """What of this host's processor a CPU executable may depend on."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:  # macOS has no /proc
        pass
    return host_platform.processor() or host_platform.machine()


def key_fields(mesh: Mesh, configs: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that changes an executable, as JSON-ready named fields.

    Args:
        mesh: the devices that it runs on.
        configs: named frozen configs (model, engine, backend): their `repr` is the key.
    """
    device = mesh.devices.flat[0]
    package = Path(__file__).resolve().parents[1]
    fields: dict[str, Any] = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "runtime": device.client.platform_version,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "mesh": dict(mesh.shape),
        "devices": [d.id for d in mesh.devices.flat],
        "num_devices": jax.device_count(),
        "xla_flags": normalised_flags(os.environ.get("XLA_FLAGS", "")),
        "libtpu_flags": normalised_flags(os.environ.get("LIBTPU_INIT_ARGS", "")),
        "matmul_precision": str(
            jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        ),
        "sources": source_digest(_source_roots(package)),
    }
    if device.platform == "cpu":
        fields["cpu"] = cpu_features()
    fields.update({name: repr(value) for name, value in configs.items()})
    return fields


def _source_roots(package: Path) -> tuple[Path, ...]:
    """The folders whose code a program is traced from, in a checkout and in a wheel alike."""
    inner = package / "tpu_vl" if (package / "tpu_vl").is_dir() else package
    return tuple((inner / name).resolve() for name in ("models", "engine", "kernels", "precompile"))


def key_of(fields: Mapping[str, Any]) -> str:
    """The digest that names the sub-folder of a set of key fields."""
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def default_folder() -> Path:
    """The per-user cache: `$TPU_VL_CACHE`, else `$XDG_CACHE_HOME`, else `~/.cache`."""
    if root := os.environ.get("TPU_VL_CACHE"):
        return Path(root) / "executables"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tpu-vl" / "executables"


def make_private(folder: Path) -> None:
    """Makes the folder, readable and writable by its owner alone.

    Raises:
        ConfigError: it belongs to another user, or others may write into it; give
            `--executables` a folder of your own.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"the executables folder {folder} can be written by other users (owner "
            f"{status.st_uid}, mode {status.st_mode & 0o777:o}) and loading executables runs code: "
            "give --executables a folder that only you can write (chmod 700)"
        )


@dataclass(frozen=True)
class Store:
    """Executables of one key under a trusted folder.

    Args:
        folder: the trusted folder; made private if it does not exist.
        fields: the key fields (`key_fields`).
    """

    folder: Path
    fields: Mapping[str, Any]

    @property
    def key_folder(self) -> Path:
        """Where this key's files are."""
        return self.folder / key_of(self.fields)

    def path(self, name: str) -> Path:
        """The file of one program."""
        return self.key_folder / (name.replace("/", "-") + ".exe")

    def load(
        self, name: str, in_tree: Any, out_tree: Any, mesh: Mesh
    ) -> jax.stages.Compiled | None:
        """The stored executable, or None where it must be compiled.

        Args:
            name: program name.
            in_tree: tree structure of `(args, kwargs)`.
            out_tree: tree structure of the result.
            mesh: devices to load it on.
        """
        path = self.path(name)
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("executable %s cannot be read (%s): compiling it", path, error)
            return None
        digest, payload = blob[:32], blob[32:]
        if hashlib.sha256(payload).digest() != digest:
            log.warning("executable %s is damaged (digest mismatch): compiling it", path)
            return None
        try:
            return serialize_executable.deserialize_and_load(
                payload,
                in_tree,
                out_tree,
                backend=mesh.devices.flat[0].client,
                execution_devices=tuple(mesh.devices.flat),
            )
        except Exception as error:  # any failure of a foreign loader means: compile
            log.warning("executable %s does not load (%s): compiling it", path, error)
            return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Writes one executable atomically; a folder that cannot be written costs a log line."""
        payload, _, _ = serialize_executable.serialize(compiled)
        blob = hashlib.sha256(payload).digest() + payload
        try:
            self.key_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write(
                self.key_folder / "key.json", json.dumps(dict(self.fields), indent=1).encode()
            )
            self._write(self.path(name), blob)
        except OSError as error:
            log.warning("executable %s is not kept (%s)", self.path(name), error)

    def _write(self, path: Path, blob: bytes) -> None:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(blob)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
