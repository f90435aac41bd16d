"""The key: what changes it, what does not, and that a TPU host makes the one that was compiled."""

import ast
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import tpu_compile
from tpu_vl import prepare
from tpu_vl.checkpoint import open_checkpoint
from tpu_vl.config import EngineConfig
from tpu_vl.flags import SizeFlags
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile import key as keys
from tpu_vl.precompile.compile import lower_program
from tpu_vl.sized import SizedModel, list_programs, size_model

PACKAGE = keys._package()
FLAGS = SizeFlags(max_num_seqs=4, max_num_batched_tokens=16, max_frame_patches=1024)


@dataclasses.dataclass(frozen=True)
class Inner:
    """A part of a config."""

    width: int
    name: str


@dataclasses.dataclass(frozen=True)
class Config:
    """A config with a part."""

    inner: Inner
    sides: tuple[int, ...]
    none: None = None


def fields(**configs: Any) -> keys.Fields:
    return keys.key_fields(make_mesh(1), configs)


def test_configs_are_spread_over_plain_fields() -> None:
    made = fields(model=Config(Inner(3, "a"), (1, 2)), family="f")
    assert made["model.inner.width"] == 3
    assert made["model.inner.name"] == "a"
    assert made["model.sides"] == [1, 2]
    assert made["model.none"] is None
    assert made["family"] == "f"
    assert json.loads(json.dumps(made)) == made
    assert keys.key_of(json.loads(json.dumps(made))) == keys.key_of(made)


def test_every_field_is_in_the_key() -> None:
    made = fields(model=Config(Inner(3, "a"), (1, 2)))
    for name in made:
        assert keys.key_of({**made, name: "other"}) != keys.key_of(made), name
    wanted = "jax jaxlib runtime platform device_kind processor topology.num_devices devices "
    wanted += "xla_flags libtpu_flags settings.jax_default_matmul_precision sources"
    assert set(wanted.split()) <= set(made)
    assert keys.key_fields(make_mesh(2), {})["devices"] == ["0 on host 0", "1 on host 0"]


def test_the_bundled_model_has_no_address_in_its_key() -> None:
    model = size_model(FLAGS, open_checkpoint(None), make_mesh(1))
    made = prepare.fields_of(model)
    assert made["model.text.width"] == model.cfg.text.width
    assert made["engine.page_size"] == model.engine_config.page_size
    assert not [v for v in made.values() if " at 0x" in str(v)]


def test_flags_are_normalised() -> None:
    def normal(text: str, platform: str = "tpu") -> list[str]:
        return keys.normalised_flags(text, platform)

    assert normal(" --xla_b=1  --xla_a") == ["xla_a=true", "xla_b=1"]
    assert normal("--xla_a=1 --xla_a=2") == ["xla_a=2"]
    assert normal("--xla_tpu_use_enhanced_launch_barrier=true") == []
    assert normal("--xla_dump_to=/somewhere") == []
    assert normal("--xla_force_host_platform_device_count=8 --xla_cpu_x=1") == []
    assert normal("--xla_cpu_x=1", "cpu") == ["xla_cpu_x=1"]
    assert normal("--xla_a='1 2'") == ["xla_a=1 2"]


def test_flags_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "flags").write_text("--xla_b=1\n--xla_a=2\n")
    assert keys.normalised_flags(str(tmp_path / "flags"), "tpu") == ["xla_a=2", "xla_b=1"]
    assert keys.normalised_flags("/nowhere", "tpu") == ["/nowhere"]


def test_other_flags_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys.key_of(fields())
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, os.environ.get(variable, "") + " --xla_other=1")
            assert keys.key_of(fields()) != before


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's sources, one tree as in a wheel."""
    kept = shutil.ignore_patterns("__pycache__", "checkpoint", "media", "page")
    return Path(shutil.copytree(PACKAGE, tmp_path / "tpu_vl", ignore=kept))


def edit(package: Path, name: str) -> str:
    """The digest with one more line in a file."""
    path = package / name
    before = path.read_bytes()
    path.write_bytes(before + b"# changed\n")
    digest = keys.source_digest(package)
    path.write_bytes(before)
    return digest


def test_the_sources_of_programs_change_the_key_and_others_do_not(package: Path) -> None:
    before = keys.source_digest(package)
    assert before == keys.source_digest(PACKAGE) == fields()["sources"]
    programs = {
        *(f"models/{p.name}" for p in (package / "models").glob("*.py")),
        *(p.relative_to(package).as_posix() for p in package.glob("kernels/*/pallas_tpu.py")),
        *(p.relative_to(package).as_posix() for p in package.glob("kernels/*/reference.py")),
        "kernels/__init__.py",
        "precompile/programs.py",
        "engine/steps.py",
        "engine/sampling.py",
        "engine/layout.py",
        "engine/state.py",
        "mesh.py",
        "tree.py",
        "config.py",
    }
    assert len(programs) > 15
    for name in programs:
        assert edit(package, name) != before, name
    for name in (
        "precompile/plan.py",
        "precompile/program_sizes.py",
        "precompile/buckets.py",
        "engine/scheduler.py",
        "planning.py",
        "cli.py",
        "server/app.py",
    ):
        assert edit(package, name) == before, name


def test_a_new_import_and_a_new_name_change_the_key(package: Path) -> None:
    digests = {keys.source_digest(package)}
    (package / "extra.py").write_text("x = 1\n")
    assert keys.source_digest(package) in digests, "nothing imports it"
    mesh = package / "mesh.py"
    mesh.write_text(mesh.read_text() + "\ndef late():\n    from tpu_vl.extra import x\n")
    digests.add(keys.source_digest(package))
    (package / "extra.py").write_text("x = 2\n")
    digests.add(keys.source_digest(package))
    (package / "extra.py").rename(package / "other.py")
    mesh.write_text(mesh.read_text().replace("tpu_vl.extra", "tpu_vl.other"))
    digests.add(keys.source_digest(package))
    assert len(digests) == 4


def test_imports_can_be_read_from_the_sources() -> None:
    """Whatever makes a program says so in a plain import."""
    for name, body in keys._sources(PACKAGE, keys.PROGRAM_ROOTS).items():
        for node in ast.walk(ast.parse(body)):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{name}: relative"
            if isinstance(node, ast.Name | ast.Attribute):
                called = node.id if isinstance(node, ast.Name) else node.attr
                assert called not in ("__import__", "import_module"), f"{name}: {called}"


def test_every_line_that_a_program_was_traced_from_is_in_the_key() -> None:
    model = size_model(FLAGS, open_checkpoint(None), make_mesh(1))
    traced = set()
    for program in list_programs(model):
        text = lower_program(program).as_text(debug_info=True)
        traced |= set(re.findall(r'loc\("([^"]+\.py)"', text))
    ours = {Path(f).resolve() for f in traced if not {"site-packages", "tests"} & {*Path(f).parts}}
    known = {(PACKAGE / name).resolve() for name in keys._sources(PACKAGE, keys.PROGRAM_ROOTS)}
    assert len(ours) > 8
    assert ours <= known


def test_differences_show_where_values_part() -> None:
    here = {"jax": "1", "same": 3, "processor": "a " * 60 + "avx", "new": 1}
    there = {"jax": "2", "same": 3, "processor": "a " * 60 + "sse"}
    jax_version, new, processor = keys.differences(here, there)
    assert jax_version == 'jax (here "1", there "2")'
    assert new == "new (here 1, there null)"
    assert "avx" in processor
    assert "sse" in processor
    assert len(processor) < 200


def test_a_host_limit_changes_neither_key_nor_program() -> None:
    model = size_model(FLAGS, open_checkpoint(None), make_mesh(1))
    changed = {name: getattr(model.engine_config, name) + 1 for name in keys.HOST_ONLY}
    other = dataclasses.replace(
        model, engine_config=dataclasses.replace(model.engine_config, **changed)
    )
    assert prepare.fields_of(other) == prepare.fields_of(model)
    assert lowered(other) == lowered(model)


def lowered(model: SizedModel) -> list[str]:
    names = ("encode/1024", "text/4", "sample/4")
    return [lower_program(p).as_text() for p in list_programs(model) if p.name in names]


def test_host_limits_are_fields_of_the_engine_config() -> None:
    assert {f.name for f in dataclasses.fields(EngineConfig)} >= keys.HOST_ONLY


def gpu(capability: str = "9.0") -> Any:
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    device = SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H200",
        compute_capability=capability,
        id=0,
        process_index=0,
        client=client,
    )
    client.devices = lambda: [device]
    return SimpleNamespace(devices=np.array([[device]], object), shape={"data": 1, "model": 1})


def test_gpu_capability_and_driver_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(keys, "_NVIDIA_DRIVER", tmp_path / "version")
    assert keys.key_fields(gpu(), {})["processor"] == "capability 9.0, driver unknown"
    (tmp_path / "version").write_text("NVRM version: NVIDIA 580.1\nGCC version: 13\n")
    made = keys.key_fields(gpu(), {})
    assert made["processor"] == "capability 9.0, NVRM version: NVIDIA 580.1"
    assert made["runtime"] == "PJRT C API\ncuda 13000"
    assert keys.key_fields(gpu("8.0"), {}) != made


DESCRIBED = """
import json, sys
from tpu_vl import prepare
from tpu_vl.checkpoint import open_checkpoint
from tpu_vl.flags import SizeFlags
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile import targets
from tpu_vl.sized import size_model

described, checkpoint = {}, open_checkpoint(sys.argv[1])
for case in sys.argv[2:]:
    target, tp = case.split()
    mesh = make_mesh(int(tp), targets.describe_devices(targets.parse_target(target)))
    model = size_model(SizeFlags(tensor_parallel_size=int(tp)), checkpoint, mesh)
    described[target] = prepare.fields_of(model)
print(json.dumps(described))
"""
# Target, its devices, those of one host, the tensor-parallel size.
HOSTS = [
    ("v6e:1x1", 1, 1, 1),
    ("ct6e-standard-4t:2x2", 4, 4, 2),
    ("v6e:2x4", 8, 8, 2),
    ("ct6e-standard-4t:2x4", 8, 4, 2),
]


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose pages fill the devices: their number depends on the devices' memory."""
    folder = tmp_path_factory.mktemp("qwen3_vl_8b")
    config = Path(__file__).parents[1] / "configs" / "qwen3_vl_8b.json"
    (folder / "config.json").write_bytes(config.read_bytes())
    return folder


@pytest.fixture(scope="module")
def described(large_model: Path) -> dict[str, keys.Fields]:
    """The key fields that a machine without a TPU makes for each target."""
    cases = [f"{target} {tp}" for target, *_, tp in HOSTS]
    return json.loads(tpu_compile.run_script(DESCRIBED, str(large_model), *cases))


class HostDevice:
    """What jax shows of one TPU v6e device on the host that has it."""

    platform = "tpu"
    device_kind = "TPU v6 lite"
    core_on_chip = 0

    def __init__(self, index: int, client: Any, host_chips: int) -> None:
        self.id = index
        self.coords = (index % 2, index // 2, 0)
        self.process_index = index // host_chips
        self.client = client

    def memory_stats(self) -> dict[str, int]:
        """Less than the table of chips says: the runtime keeps some."""
        return {"bytes_limit": 31 * 10**9, "bytes_in_use": 12345}


def tpu_host_mesh(num_devices: int, host_chips: int, tp: int) -> Any:
    client = SimpleNamespace(
        platform_version="PJRT C API\nTFRT TPU v6 lite on this very host\nBuilt elsewhere"
    )
    devices = [HostDevice(i, client, host_chips) for i in range(num_devices)]
    client.devices = lambda: devices
    return make_mesh(tp, devices)


@pytest.mark.skipif(not tpu_compile.have_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize(("target", "num_devices", "host_chips", "tp"), HOSTS)
def test_a_tpu_host_makes_the_key_that_was_compiled(
    described: dict[str, keys.Fields],
    large_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    num_devices: int,
    host_chips: int,
    tp: int,
) -> None:
    # What jax and GKE set on a TPU host.
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " --xla_tpu_use_enhanced_launch_barrier=true")
    monkeypatch.setenv("TPU_ML_PLATFORM", "JAX")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "worker-0.example")
    mesh = tpu_host_mesh(num_devices, host_chips, tp)
    flags = SizeFlags(tensor_parallel_size=tp)
    model = size_model(flags, open_checkpoint(str(large_model)), mesh)
    assert prepare.fields_of(model) == described[target]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=1")
    assert keys.differences(prepare.fields_of(model), described[target]) == [
        'libtpu_flags (here ["xla_tpu_something=1"], there [])'
    ]


def test_a_named_library_counts_by_its_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tpu_host_mesh(1, 1, 1).devices.flat[0]
    (tmp_path / "libtpu.so").write_bytes(b"one")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    one = keys.runtime_version(device)
    (tmp_path / "libtpu.so").write_bytes(b"two")
    assert keys.runtime_version(device) != one
