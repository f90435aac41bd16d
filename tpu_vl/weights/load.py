"""Checkpoints in and out: strict safetensors reading, each device its own slices, and writing."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tpu_vl import tree
from tpu_vl.errors import CheckpointError
from tpu_vl.models.family import Family, TensorMap, placed_params
from tpu_vl.weights import layout
from tpu_vl.weights.layout import Range, axis_runs, parse_layout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30
SOURCE_DTYPES = ("F32", "BF16", "F16")
NAMED_KEYS = 5

Progress = Callable[[int, int], None]


def load_params(
    folder: str | Path,
    family: Family,
    cfg: Any,
    mesh: Mesh,
    dtype: str,
    progress: Progress | None = None,
) -> Any:
    """Reads a checkpoint folder into the family's tree, sharded as the family says.

    Keys, shapes and dtypes of all files are checked before the first value is read. Every value is
    read once, converted and sent on its own, so beside what the devices hold the host holds about
    one device's part of one array at a time, and no device ever more than its own part.

    Args:
        folder: has `model.safetensors`, or shards with `model.safetensors.index.json`.
        family, cfg: the model.
        mesh: where the arrays go.
        dtype: "float32" or "bfloat16"; bf16, f16 and f32 tensors are converted to it.
        progress: called with (bytes done, bytes in all) of the loaded tree after each array.

    Returns:
        The tree of `family.abstract_params`.

    Raises:
        CheckpointError: files, keys, shapes or dtypes do not match the model, named one by one.
    """
    placed = placed_params(family, cfg, dtype, mesh)
    with ExitStack() as stack:
        files = _Files(Path(folder), family, stack)
        leaves = _leaves(placed)
        sources = {m.path: _Source(m, files, leaves[m.path]) for m in family.checkpoint_map(cfg)}
        _check_keys(files, sources.values(), family.skip_keys(cfg))
        _check_tensors(sources.values())
        total = tree.num_bytes(placed)
        done = 0

        def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            nonlocal done
            array = _place(sources.pop(tree.path_text(path)), leaf)
            done += tree.num_bytes(leaf)
            if progress is not None:
                progress(done, total)
            return array

        return jax.tree_util.tree_map_with_path(read, placed)


def save_params(
    folder: str | Path,
    params: Any,
    family: Family,
    cfg: Any,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a tree as HF-format safetensors, sharded with an index when over the limit.

    Args:
        folder: made if missing.
        params: a tree of `family.abstract_params(cfg, ...)` whose arrays this process can read.
        family, cfg: the model.
        max_shard_bytes: of one file; a larger tensor gets a file of its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writes = [
        (key, m, layer) for m in family.checkpoint_map(cfg) for layer, key in enumerate(_keys(m))
    ]
    leaves = _leaves(params)
    shards = _pack_shards(writes, leaves, max_shard_bytes)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: _to_file(leaves[m.path], m, layer) for key, m, layer in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = tree.num_bytes(params)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _place(source: "_Source", leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """One array on its devices, a part after the other; equal parts are read once."""
    assert leaf.sharding is not None
    holders: dict[tuple[Range, ...], list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        ranges = [s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True)]
        holders.setdefault(tuple(ranges), []).append(device)
    parts: list[jax.Array] = []
    for ranges, devices in holders.items():
        values = source.read(ranges)
        # Waited for, so that the host's copy goes before the next part is read.
        parts += jax.block_until_ready([jax.device_put(values, device) for device in devices])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


class _Files:
    """The open files of a checkpoint and where each canonical key is."""

    def __init__(self, folder: Path, family: Family, stack: ExitStack) -> None:
        self.folder = folder
        self.views: dict[str, tuple[Any, str]] = {}
        for name in _file_names(folder):
            try:
                handle = stack.enter_context(safe_open(folder / name, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{folder / name} cannot be read as safetensors ({error}); download the "
                    "checkpoint again"
                ) from error
            for key in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                canonical = canonical_key(key, family.key_prefixes)
                if canonical in self.views:
                    raise CheckpointError(
                        f"{folder}: keys {self.views[canonical][1]!r} and {key!r} both stand for "
                        f"{canonical!r}"
                    )
                self.views[canonical] = handle, key

    def view(self, canonical: str) -> Any:
        """The lazily read tensor of a key."""
        handle, key = self.views[canonical]
        return handle.get_slice(key)


def canonical_key(key: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """The canonical form of a key: the first prefix that fits is exchanged."""
    for published, canonical in prefixes:
        if key.startswith(published):
            return canonical + key.removeprefix(published)
    return key


def _file_names(folder: Path) -> list[str]:
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    names = sorted(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
    absent = [n for n in names if not (folder / n).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: {INDEX_FILE} names {len(absent)} files that are not there: "
            f"{_first(absent)}; download the checkpoint again"
        )
    return names


class _Source:
    """How one array of the tree is read from the files."""

    def __init__(self, tensor: TensorMap, files: _Files, leaf: jax.ShapeDtypeStruct) -> None:
        self.tensor = tensor
        self.files = files
        self.leaf = leaf
        self.keys = _keys(tensor)
        self.stacked = tensor.num_stacked is not None
        dims = tree.suffix(tensor.path.rsplit(".", 1)[1])
        self.dims = dims[1:] if self.stacked else dims
        shape = leaf.shape[1:] if self.stacked else leaf.shape
        self.sizes = layout.file_sizes(tensor, dict(zip(self.dims, shape, strict=True)))
        self.groups = parse_layout(tensor.layout)
        self._repeated: dict[tuple[Any, ...], np.ndarray] = {}

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape that each of the file's tensors must have."""
        return self.tensor.file_shape or _grouped_shape(self.groups, self.sizes)

    def read(self, ranges: tuple[Range, ...]) -> np.ndarray:
        """The part of the array in the tree within [start, stop) of each dim."""
        if not self.stacked:
            return np.ascontiguousarray(self._read_tensor(self.keys[0], ranges))
        start, stop = ranges[0]
        out = np.empty(tuple(b - a for a, b in ranges), self.leaf.dtype)
        for row, key in enumerate(self.keys[start:stop]):
            out[row] = self._read_tensor(key, ranges[1:])
        return out

    def _read_tensor(self, key: str, ranges: tuple[Range, ...]) -> np.ndarray:
        wanted = dict(zip(self.dims, ranges, strict=True))
        in_file = tuple(
            layout.file_range(self.tensor, d, r, self.sizes[d]) for d, r in wanted.items()
        )
        values = self._repeated.get((key, in_file))
        if values is None:
            values = self._read_file(key, dict(zip(wanted, in_file, strict=True)))
            if self.tensor.repeat is not None:
                self._repeated[key, in_file] = values
        return layout.held(values, self.tensor, self.dims, wanted)

    def _read_file(self, key: str, wanted: Mapping[str, Range]) -> np.ndarray:
        """What the file holds in the wanted ranges, axes in the tree's order."""
        shape = [b - a for a, b in wanted.values()]
        if 0 in shape:
            return np.zeros(shape, self.leaf.dtype)
        view = self.files.view(key)
        order = [d for group in self.groups for d in group]
        if self.tensor.file_shape is None:
            runs = [axis_runs(group, self.sizes, wanted) for group in self.groups]
            values = _read_runs(view, runs)
            values = values.reshape([wanted[d][1] - wanted[d][0] for d in order])
        else:
            values = view[:].reshape([self.sizes[d] for d in order])
            values = values[tuple(slice(*wanted[d]) for d in order)]
        values = values.transpose([order.index(d) for d in self.dims])
        return values.astype(self.leaf.dtype, copy=False)


def _read_runs(view: Any, runs: list[list[slice]], chosen: tuple[slice, ...] = ()) -> np.ndarray:
    axis = len(chosen)
    if axis == len(runs):
        return view[chosen]
    parts = [_read_runs(view, runs, (*chosen, run)) for run in runs[axis]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def _check_keys(files: _Files, sources: Iterable[_Source], skip_keys: tuple[str, ...]) -> None:
    wanted = [key for source in sources for key in source.keys]
    missing = [key for key in wanted if key not in files.views]
    skip = re.compile("|".join(f"(?:{s})" for s in skip_keys) or r"(?!)")
    known = set(wanted)
    unexpected = [
        original
        for canonical, (_, original) in files.views.items()
        if canonical not in known and not skip.fullmatch(canonical)
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} keys are missing: {_first(missing)}")
    if "lm_head.weight" in missing:
        problems.append(
            "lm_head.weight is needed because tie_word_embeddings is false in config.json: add the "
            "tensor, or set the flag to true if the embedding is the output matrix"
        )
    if unexpected:
        problems.append(f"{len(unexpected)} keys are unexpected: {_first(unexpected)}")
    if problems:
        raise CheckpointError(f"{files.folder} does not match the model: " + "; ".join(problems))


def _check_tensors(sources: Iterable[_Source]) -> None:
    problems = []
    for source in sources:
        for key in source.keys:
            view = source.files.view(key)
            found = tuple(view.get_shape())
            if found != source.file_shape:
                problems.append(f"{key} has shape {found}, the config asks {source.file_shape}")
            elif view.get_dtype() not in SOURCE_DTYPES:
                problems.append(f"{key} has dtype {view.get_dtype()}, not {SOURCE_DTYPES}")
    if problems:
        shown = "; ".join(problems[:NAMED_KEYS])
        raise CheckpointError(f"{len(problems)} tensors do not fit the model: {shown}")


def _keys(tensor: TensorMap) -> list[str]:
    """The canonical keys of a map, layer by layer."""
    if tensor.num_stacked is None:
        return [tensor.key]
    return [tensor.key.format(i) for i in tensor.stacked_ids or range(tensor.num_stacked)]


def _grouped_shape(
    groups: tuple[tuple[str, ...], ...], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    return tuple(int(np.prod([sizes[d] for d in group], dtype=np.int64)) for group in groups)


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED_KEYS])
    return shown + ", ..." if len(names) > NAMED_KEYS else shown


def _leaves(params: Any) -> dict[str, Any]:
    return {tree.path_text(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _pack_shards(
    writes: list[tuple[str, TensorMap, int]], leaves: Mapping[str, Any], max_shard_bytes: int
) -> list[list[tuple[str, TensorMap, int]]]:
    shards: list[list[tuple[str, TensorMap, int]]] = [[]]
    used = 0
    for write in writes:
        tensor = write[1]
        size = tree.num_bytes(leaves[tensor.path]) // (tensor.num_stacked or 1)
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(write)
        used += size
    return shards


def _to_file(leaf: jax.Array, tensor: TensorMap, layer: int) -> np.ndarray:
    dims = tree.suffix(tensor.path.rsplit(".", 1)[1])
    values = np.asarray(leaf)
    if tensor.num_stacked is not None:
        dims, values = dims[1:], values[layer]
    values = layout.in_file(values, tensor, dims)
    groups = parse_layout(tensor.layout)
    sizes = dict(zip(dims, values.shape, strict=True))
    values = values.transpose([dims.index(d) for group in groups for d in group])
    return np.ascontiguousarray(values.reshape(tensor.file_shape or _grouped_shape(groups, sizes)))
