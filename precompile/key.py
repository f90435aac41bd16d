"""The key of executables: named fields of everything that changes one, and their digest.

The fields are the same on a machine without a TPU that compiles for a described topology and on
the TPU host that serves: nothing in them says where they were made. They are flat and plain JSON,
so that a key that differs can be told by the field.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform as host_platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.sharding import Mesh

Fields = Mapping[str, Any]

# A TPU host's jax appends the first by itself; the others place files or describe a CPU host.
_IGNORED_FLAGS = ("xla_tpu_use_enhanced_launch_barrier", "xla_dump_")
_CPU_FLAGS = ("xla_cpu_", "xla_force_host_platform_device_count")

# jax's settings that change what is traced or how it is compiled; one that a version of jax does
# not have counts as None.
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)

# Fields of EngineConfig that bound what the host does and that no program sees.
HOST_ONLY = frozenset(
    {"max_num_queued_reqs", "vision_step_patch_layers", "vision_attention_patches"}
)

PROGRAM_ROOTS = ("precompile.compile", "precompile.programs", "models.registry")
"""Modules that with all that they import make the programs: what lists and lowers them, and the
models that they are handed."""

_PACKAGE = "tpu_vl."
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_SHOWN_CHARACTERS = 60


def key_of(fields: Fields) -> str:
    """The digest that names a set of key fields."""
    text = json.dumps(dict(fields), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def key_fields(mesh: Mesh, configs: Mapping[str, Any]) -> Fields:
    """Everything that changes an executable, flat and as plain JSON.

    Args:
        mesh: the devices that it runs on, described or real.
        configs: named frozen configs (model, engine, family, implementations): dataclasses are
            spread over one field per value.
    """
    device = mesh.devices.flat[0]
    values: dict[str, Any] = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "runtime": runtime_version(device),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "processor": _processor(device),
        "topology": topology(device.client.devices()),
        "mesh": dict(mesh.shape),
        "devices": [_place(d) for d in mesh.devices.flat],
        "xla_flags": normalised_flags(os.environ.get("XLA_FLAGS", ""), device.platform),
        "libtpu_flags": normalised_flags(os.environ.get("LIBTPU_INIT_ARGS", ""), device.platform),
        "settings": {name: jax.config.values.get(name) for name in _JAX_SETTINGS},
        "sources": source_digest(_package()),
        **configs,
    }
    return json.loads(json.dumps(_flat(values)))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """`{"engine": config}` -> `{"engine.page_size": 64, ...}`; what is no JSON becomes text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        value = {k: v for k, v in value.items() if k not in HOST_ONLY}
    if isinstance(value, Mapping):
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            flat |= _flat(inner, f"{name}.{key}" if name else str(key))
        return flat
    if isinstance(value, list | tuple):
        value = [v if isinstance(v, str | int | float) else repr(v) for v in value]
    elif not isinstance(value, str | int | float | None):
        value = repr(value)
    return {name: value}


def runtime_version(device: Any) -> str:
    """The compiler and runtime behind a device.

    A TPU's is the version of libtpu that is loaded: what the client says of itself also tells of
    the host.
    """
    if device.platform != "tpu":
        return device.client.platform_version
    packaged = importlib.util.find_spec("libtpu")
    folder = None if packaged is None or packaged.origin is None else Path(packaged.origin).parent
    # The package sets the variable to its own library when it is imported.
    library = os.environ.get("TPU_LIBRARY_PATH")
    if library is None or Path(library).parent == folder:
        return f"libtpu {importlib.metadata.version('libtpu')}"
    with open(library, "rb") as file:
        return f"libtpu sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _processor(device: Any) -> str:
    """What of the processor an executable may depend on, beside the device kind."""
    if device.platform == "cpu":
        return cpu_features()
    if device.platform == "gpu":
        return f"capability {device.compute_capability}, {gpu_driver()}"
    return ""


def cpu_features() -> str:
    """What of this host's processor a CPU executable may depend on."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:  # macOS has no /proc
        pass
    return host_platform.processor() or host_platform.machine()


def gpu_driver() -> str:
    """The line in which the NVIDIA kernel driver names its version."""
    try:
        return _NVIDIA_DRIVER.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return "driver unknown"


def topology(devices: Sequence[Any]) -> dict[str, Any]:
    """The shape of all devices of a client: how many, in which box, on how many hosts.

    Args:
        devices: every device, those of other hosts too.
    """
    shape: dict[str, Any] = {
        "num_devices": len(devices),
        "num_hosts": len({d.process_index for d in devices}),
    }
    if devices[0].platform == "tpu":
        host = devices[0].process_index
        shape["bounds"] = _bounds(devices)
        shape["host_bounds"] = _bounds([d for d in devices if d.process_index == host])
    return shape


def _bounds(devices: Sequence[Any]) -> str:
    """Chips in each direction, such as 2x2x1."""
    sides = zip(*(d.coords for d in devices), strict=True)
    return "x".join(str(max(side) - min(side) + 1) for side in sides)


def _place(device: Any) -> str:
    """A device by its id and its place: which shard it holds depends on both."""
    if device.platform != "tpu":
        return f"{device.id} on host {device.process_index}"
    coords = ",".join(str(c) for c in device.coords)
    return f"{device.id} at {coords} core {device.core_on_chip} on host {device.process_index}"


def normalised_flags(text: str, platform: str) -> list[str]:
    """Compiler flags in a fixed order, the last of each name, without those that change nothing.

    Args:
        text: value of XLA_FLAGS or LIBTPU_INIT_ARGS: flags, or the name of a file with flags.
        platform: "tpu", "cpu" or "gpu"; only CPU programs depend on the CPU's flags.
    """
    if text and not text.lstrip().startswith("-"):
        try:
            text = Path(text.strip()).read_text()
        except OSError:
            return [text]
    ignored = _IGNORED_FLAGS if platform == "cpu" else _IGNORED_FLAGS + _CPU_FLAGS
    flags: dict[str, str] = {}
    for flag in shlex.split(text):
        name, _, value = flag.lstrip("-").partition("=")
        if not name.startswith(ignored):
            flags[name] = value or "true"
    return [f"{name}={value}" for name, value in sorted(flags.items())]


def source_digest(package: Path, roots: Sequence[str] = PROGRAM_ROOTS) -> str:
    """SHA-256 over Python sources, names and contents.

    Args:
        package: folder of the package `tpu_vl`.
        roots: modules without the package's name; with what they import, directly or not.
    """
    digest = hashlib.sha256()
    for name, body in sorted(_sources(package, roots).items()):
        label = name.encode()
        digest.update(len(label).to_bytes(8, "little") + label)
        digest.update(len(body).to_bytes(8, "little") + body)
    return digest.hexdigest()


def _sources(package: Path, roots: Sequence[str]) -> dict[str, bytes]:
    """Name and content of each file of the package that the roots import.

    A module counts with every package that it lies in, and wherever in a file it is imported.
    """
    found: dict[str, bytes] = {}
    todo = list(roots)
    while todo:
        module = todo.pop()
        path = module.replace(".", "/")
        name = next(
            (n for n in (f"{path}.py", f"{path}/__init__.py") if (package / n).is_file()), None
        )
        if name is None or name in found:  # None: a name inside a module, which is there itself
            continue
        found[name] = (package / name).read_bytes()
        todo += [parent for parent, dot, _ in [module.rpartition(".")] if dot]
        todo += _imports(found[name])
    return found


def _imports(body: bytes) -> Iterator[str]:
    """What of the package a file imports, without the package's name: modules, names in them."""
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (n.removeprefix(_PACKAGE) for n in names if n.startswith(_PACKAGE))


def _package() -> Path:
    """The folder of the package, in a checkout and in a wheel alike."""
    parent = Path(__file__).resolve().parents[1]
    return parent / "tpu_vl" if (parent / "tpu_vl").is_dir() else parent


def differences(mine: Fields, theirs: Fields) -> list[str]:
    """The fields that differ, each with both values, shortened to where they part.

    Args:
        mine: what is wanted here.
        theirs: what is there.
    """
    names = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
    return [_difference(n, json.dumps(mine.get(n)), json.dumps(theirs.get(n))) for n in names]


def _difference(name: str, here: str, there: str) -> str:
    parts = (i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
    start = max(next(parts, min(len(here), len(there))) - _SHOWN_CHARACTERS // 4, 0)
    return f"{name} (here {_shown(here, start)}, there {_shown(there, start)})"


def _shown(text: str, start: int) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    end = start + _SHOWN_CHARACTERS
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
