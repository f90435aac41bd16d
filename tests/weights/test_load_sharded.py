"""Loading on several devices: every byte read once, no part too large, little memory beside it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.tensor_parallel.model import FAMILY, config_dict, model_config
from tpu_vl.mesh import make_mesh
from tpu_vl.models.family import placed_params
from tpu_vl.weights import load
from tpu_vl.weights.load import load_params, save_params
from tpu_vl.weights.random import random_params

ROOT = Path(__file__).resolve().parents[2]
SIZES = [
    (1, "weights"),
    (2, "weights"),
    (3, "weights"),
    (4, "data"),
    (6, "weights"),
    (8, "weights"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whole")
    cfg = model_config(1, "weights")
    save_params(made, random_params(FAMILY, cfg, make_mesh(1), "float32", 0), FAMILY, cfg)
    return made


class Counted:
    """An open file, or a tensor of it, whose bytes are counted by key as they are read."""

    def __init__(self, real: Any, read: Counter[str], key: str = "") -> None:
        self._real, self._read, self._key = real, read, key

    def __enter__(self) -> "Counted":
        return Counted(self._real.__enter__(), self._read)

    def __exit__(self, *args: Any) -> None:
        self._real.__exit__(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_slice(self, key: str) -> "Counted":
        return Counted(self._real.get_slice(key), self._read, key)

    def __getitem__(self, index: Any) -> np.ndarray:
        values = self._real[index]
        self._read[self._key] += values.nbytes
        return values


@pytest.mark.parametrize(("size", "mode"), SIZES)
def test_each_byte_is_read_once_and_no_device_gets_more_than_its_part(
    size: int, mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()
    plain, put = load.safe_open, jax.device_put
    sent: list[tuple[int, ...]] = []

    def counted_put(values: np.ndarray, device: Any) -> jax.Array:
        sent.append(values.shape)
        return put(values, device)

    monkeypatch.setattr(load, "safe_open", lambda *a, **k: Counted(plain(*a, **k), read))
    monkeypatch.setattr(load.jax, "device_put", counted_put)
    cfg, mesh = model_config(size, mode), make_mesh(size)
    found = load_params(folder, FAMILY, cfg, mesh, "float32")
    tensors = load_file(folder / load.SINGLE_FILE)
    assert dict(read) == {key: values.nbytes for key, values in tensors.items()}
    leaves = jax.tree.leaves(placed_params(FAMILY, cfg, "float32", mesh))
    parts = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves for _ in range(size)]
    assert Counter(sent) == Counter(parts)
    for leaf, want in zip(jax.tree.leaves(found), leaves, strict=True):
        assert leaf.sharding == want.sharding
        assert len(leaf.addressable_shards) == size


@pytest.mark.parametrize(("size", "mode"), SIZES)
def test_what_a_mesh_holds_is_saved_as_the_checkpoint_that_it_was(
    size: int, mode: str, folder: Path, tmp_path: Path
) -> None:
    cfg = model_config(size, mode)
    held = load_params(folder, FAMILY, cfg, make_mesh(size), "float32")
    save_params(tmp_path, held, FAMILY, cfg)
    want, got = load_file(folder / load.SINGLE_FILE), load_file(tmp_path / load.SINGLE_FILE)
    assert want.keys() == got.keys()
    for key in want:
        np.testing.assert_array_equal(got[key], want[key])
    drawn = random_params(FAMILY, cfg, make_mesh(size), "float32", 0)
    for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(drawn), strict=True):
        np.testing.assert_array_equal(a, b)


def test_copies_and_padding_are_what_the_file_says(folder: Path) -> None:
    params = load_params(folder, FAMILY, model_config(3, "weights"), make_mesh(3), "float32")
    one = load_params(folder, FAMILY, model_config(1, "weights"), make_mesh(1), "float32")
    k, k_one = (np.asarray(p.text.layers[1].k_DKH) for p in (params, one))
    assert (k.shape, k_one.shape) == ((40, 12, 8), (40, 4, 8))
    for head in range(12):
        np.testing.assert_array_equal(k[:, head], k_one[:, head // 3])
    up = np.asarray(params.text.layers[0].up_DF)
    np.testing.assert_array_equal(up[:, :50], one.text.layers[0].up_DF)
    assert up.shape[1] == 51
    assert not up[:, 50:].any()
    head = np.asarray(params.text.head_VD)
    assert head.shape[0] == 384
    assert not head[199:].any()


@pytest.mark.parametrize("damage", ["copy", "padding"])
def test_a_tree_that_is_no_checkpoint_any_more_is_not_saved(
    damage: str, folder: Path, tmp_path: Path
) -> None:
    cfg, mesh = model_config(3, "weights"), make_mesh(3)
    params = load_params(folder, FAMILY, cfg, mesh, "float32")
    layer = params.text.layers[0]
    if damage == "copy":
        layer = layer.replace(v_DKH=layer.v_DKH.at[0, 1, 0].add(1))
    else:
        layer = layer.replace(up_DF=layer.up_DF.at[0, 50].add(1))
    params = params.replace(text=params.text.replace(layers=(layer, *params.text.layers[1:])))
    wanted = {"copy": "copies along K differ", "padding": "padding along F behind 50"}[damage]
    with pytest.raises(ValueError, match=wanted):
        save_params(tmp_path, params, FAMILY, cfg)


def larger_dict() -> dict[str, Any]:
    """A model of some 60 MB, its arrays in the proportions of a large one."""
    raw = config_dict(tower_heads=16, num_heads=8, num_kv_heads=2)
    raw["text_config"] |= {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096}
    raw["text_config"] |= {"num_hidden_layers": 12, "head_dim": 32}
    raw["text_config"]["rope_scaling"]["mrope_section"] = [6, 5, 5]
    raw["vision_config"] |= {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 256}
    return raw


SCRIPT = """
import json, os, sys, threading, time
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
from tests.tensor_parallel.model import FAMILY
from tpu_vl.mesh import make_mesh
from tpu_vl.weights.load import load_params

def own_bytes():  # memory of this process that no file backs
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

size = int(sys.argv[2])
cfg = FAMILY.shard(FAMILY.parse_config(json.loads(sys.argv[3])), size, "weights")
mesh = make_mesh(size)
jax.block_until_ready([jax.device_put(b"x"[0], d) for d in mesh.devices.flat])
before = peak = own_bytes()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, own_bytes())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
params = load_params(sys.argv[1], FAMILY, cfg, mesh, "float32")
done = True
thread.join()
share = sum(s.data.nbytes for a in jax.tree.leaves(params) for s in a.addressable_shards)
print(json.dumps({"peak": peak - before, "share": share, "after": own_bytes() - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("size", [1, 4])
def test_memory_stays_below_1_3_times_the_hosts_share(size: int, tmp_path: Path) -> None:
    raw = larger_dict()
    cfg = FAMILY.parse_config(raw)
    save_params(tmp_path, random_params(FAMILY, cfg, make_mesh(1), "float32", 0), FAMILY, cfg)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(size), json.dumps(raw)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["share"] > 40 << 20
    assert found["share"] * 0.9 < found["after"], "the measure sees the weights"
    assert found["peak"] < 1.3 * found["share"], found
