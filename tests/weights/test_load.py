"""Loading: every key is accounted for by name, every device reads its own slices, and back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.weights.small import small_config
from tpu_vl.errors import CheckpointError
from tpu_vl.mesh import make_mesh
from tpu_vl.models import qwen3_vl
from tpu_vl.weights import load
from tpu_vl.weights.load import load_params, save_params
from tpu_vl.weights.random import random_params

FAMILY = qwen3_vl.FAMILY
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def params() -> Any:
    return random_params(FAMILY, small_config(), make_mesh(1), "float32", 0)


@pytest.fixture(scope="module")
def tensors(params: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("saved")
    save_params(folder, params, FAMILY, small_config())
    return load_file(folder / FILE)


def read(folder: Path, *, size: int = 1, dtype: str = "float32", **config: bool) -> Any:
    return load_params(folder, FAMILY, small_config(**config), make_mesh(size), dtype)


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / FILE)
    return folder


def assert_equal(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_layouts_are_those_of_the_file(params: Any, tensors: dict[str, np.ndarray]) -> None:
    layer = params.text.layers[1]
    q_ND = tensors["model.language_model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(np.asarray(layer.q_DNH).reshape(40, -1).T, q_ND)
    o_DN = tensors["model.language_model.layers.1.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(np.asarray(layer.o_NHD).reshape(-1, 40).T, o_DN)
    qkv = tensors["model.visual.blocks.4.attn.qkv.weight"]
    own = np.asarray(params.vision.layers.qkv_YD3NH)[4]
    np.testing.assert_array_equal(own.reshape(48, -1).T, qkv)
    kernel = tensors["model.visual.patch_embed.proj.weight"]
    assert kernel.shape == (48, 3, 2, 4, 4)
    np.testing.assert_array_equal(np.asarray(params.vision.patch_WD).T, kernel.reshape(48, -1))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 60_000])
def test_saved_params_load_equal(
    size: int, max_shard_bytes: int, params: Any, tmp_path: Path
) -> None:
    save_params(tmp_path, params, FAMILY, small_config(), max_shard_bytes)
    assert (tmp_path / load.INDEX_FILE).is_file() == (max_shard_bytes == 60_000)
    found = read(tmp_path, size=size)
    assert_equal(found, params)
    heads = found.vision.layers.qkv_YD3NH
    assert heads.sharding.shard_shape(heads.shape) == (5, 48, 3, 4 // size, 12)


def test_each_device_reads_only_its_slices(
    params: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_params(tmp_path, params, FAMILY, small_config())
    sizes: list[int] = []
    plain = load._read_runs

    def counted(view: Any, runs: Any, chosen: Any = ()) -> Any:
        out = plain(view, runs, chosen)
        if len(chosen) == len(runs):
            sizes.append(out.size)
        return out

    monkeypatch.setattr(load, "_read_runs", counted)
    found = read(tmp_path, size=2)
    whole = sum(a.size for a in jax.tree.leaves(found)) - found.vision.patch_WD.size
    assert sum(sizes) == whole  # two devices, a half each; whole arrays once
    assert max(sizes) == 192 * 192 // 2  # the largest matrix, one device's half


@pytest.mark.parametrize("source", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_source_dtypes_are_converted(
    source: Any, dtype: str, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    write(tmp_path, {k: v.astype(source) for k, v in tensors.items()})
    found = np.asarray(read(tmp_path, dtype=dtype).text.embed_IE)
    want = tensors["model.language_model.embed_tokens.weight"].astype(source)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, want.astype(found.dtype))


def test_progress_ends_at_the_total(params: Any, tmp_path: Path) -> None:
    save_params(tmp_path, params, FAMILY, small_config())
    calls: list[tuple[int, int]] = []
    load_params(
        tmp_path, FAMILY, small_config(), make_mesh(1), "float32",
        lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    dones = [done for done, _ in calls]
    assert dones == sorted(dones)
    assert calls[-1][0] == calls[-1][1] == sum(a.nbytes for a in jax.tree.leaves(params))


LAYOUTS: dict[str, Callable[[str], str]] = {
    "model.language_model.": lambda k: k,
    "language_model.model.": lambda k: (
        k.replace("model.language_model.", "language_model.model.")
        .replace("model.visual.", "visual.")
        .replace("lm_head.", "language_model.lm_head.")
    ),
    "model.": lambda k: k.replace("model.language_model.", "model.").replace(
        "model.visual.", "visual."
    ),
    "language_model.": lambda k: k.replace("model.language_model.", "language_model.").replace(
        "model.visual.", "visual."
    ),
    "none": lambda k: k.replace("model.language_model.", "").replace("model.visual.", "visual."),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_key_layouts_load(
    layout: str, params: Any, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    rename = LAYOUTS[layout]
    write(tmp_path, {rename(k): v for k, v in tensors.items()})
    assert_equal(read(tmp_path), params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_key_is_fatal_in_every_layout(
    layout: str, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    rename = LAYOUTS[layout]
    gone = "model.language_model.layers.2.mlp.up_proj.weight"
    write(tmp_path, {rename(k): v for k, v in tensors.items() if k != gone})
    with pytest.raises(CheckpointError, match=f"1 keys are missing: {gone}"):
        read(tmp_path)


def test_unexpected_keys_are_fatal_and_named(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    extra = {f"model.visual.extra.{i}": np.zeros(3, np.float32) for i in range(7)}
    write(tmp_path, tensors | extra)
    with pytest.raises(
        CheckpointError, match=r"7 keys are unexpected: model\.visual\.extra\.0, .*, \.{3}"
    ):
        read(tmp_path)


def test_two_spellings_of_one_key_are_fatal(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    norm = tensors["model.language_model.norm.weight"]
    write(tmp_path, tensors | {"norm.weight": norm})
    with pytest.raises(CheckpointError, match=r"both stand for 'model\.language_model\.norm"):
        read(tmp_path)


def test_untied_without_a_head_names_the_key_and_the_flag(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    write(tmp_path, {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings is false"):
        read(tmp_path)
    assert read(tmp_path, tied=True).text.head_VD is None


def test_tied_skips_a_present_head_by_name(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    write(tmp_path, tensors)
    assert read(tmp_path, tied=True).text.head_VD is None
    write(tmp_path, tensors | {"lm_head.bias": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"unexpected: lm_head\.bias"):
        read(tmp_path, tied=True)


def test_shapes_and_dtypes_are_checked_before_reading(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    key = "model.language_model.layers.0.self_attn.k_proj.weight"
    write(tmp_path, tensors | {key: tensors[key].T})
    with pytest.raises(CheckpointError, match=rf"{key} has shape \(40, 28\).*\(28, 40\)"):
        read(tmp_path)
    write(tmp_path, tensors | {key: tensors[key].astype(np.int8)})
    with pytest.raises(CheckpointError, match=rf"{key} has dtype I8"):
        read(tmp_path)


def test_text_only_skips_the_tower_and_reads_the_rest(
    params: Any, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    # Tower tensors that could not be used show that they are not looked at.
    broken = {k: np.zeros(1, np.int8) if ".visual." in k else v for k, v in tensors.items()}
    write(tmp_path, broken)
    found = read(tmp_path, with_vision=False)
    assert found.vision is None
    assert_equal(found.text, params.text)


def test_absent_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither .* nor"):
        read(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / load.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        read(tmp_path)
    (tmp_path / FILE).write_bytes(b"<html>not weights</html>")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read(tmp_path)
