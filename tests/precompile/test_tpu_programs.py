"""Whole programs of Qwen3-VL-8B's real shape, from config values alone, by the TPU compiler."""

import json

import pytest

from tests import tpu_compile

pytestmark = pytest.mark.skipif(
    not tpu_compile.have_libtpu(), reason="libtpu, the TPU compiler, is not installed"
)

SCRIPT = """
import json, sys
from tests.tpu_compile import tpu_topology_mesh
from tpu_vl import defaults
from tpu_vl.flags import ServeFlags
from tpu_vl.models.registry import family_of
from tpu_vl.precompile.compile import compile_program
from tpu_vl.precompile.programs import make_backend, programs

config = json.load(open("tests/configs/qwen3_vl_8b.json"))
family = family_of(config)
cfg = family.parse_config(config, with_vision=True, preprocessor=None)
mesh = tpu_topology_mesh("v6e:2x2", tp=4)
flags = ServeFlags(tensor_parallel_size=4, kv_cache_memory_bytes=48 << 30)
sizes = defaults.engine_config(flags, family, cfg, mesh, ("image", "video"), 262144)
listed = {p.name: p for p in programs(family, cfg, sizes, make_backend(mesh, sizes))}
print(json.dumps({"name": "list", "programs": sorted(listed), "dtype": sizes.dtype}))
for name in sys.argv[1:]:
    compiled = compile_program(listed[name])
    memory = compiled.memory_analysis()
    print(json.dumps({
        "name": name,
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }))
"""


def compile_programs(*names: str, timeout_s: float) -> list[dict]:
    out = tpu_compile.run_script(SCRIPT, *names, timeout_s=timeout_s)
    return [json.loads(line) for line in out.splitlines()]


def test_a_tower_and_a_text_program_compile_for_v6e() -> None:
    listed, tower, text = compile_programs("encode/4096", "text/64", timeout_s=500)
    assert len(listed["programs"]) <= 40
    assert listed["dtype"] == "bfloat16"
    assert tower["kernels"] == 1, "the tower is one loop over layers"
    assert text["kernels"] == 36, "one attention kernel per layer"
    for program in (tower, text):
        # The donated state (KV pages and pool) is updated in place, and everything fits 32 GB.
        assert program["alias_bytes"] > 10 << 30
        assert program["temp_bytes"] < 1 << 30
        assert program["argument_bytes"] + program["temp_bytes"] < 31 << 30


@pytest.mark.slow
def test_every_program_compiles_for_v6e() -> None:
    listed = compile_programs(timeout_s=300)[0]["programs"]
    found = compile_programs(*listed, timeout_s=3000)[1:]
    assert [f["name"] for f in found] == listed
    assert sum(f["code_bytes"] for f in found) < 2 << 30
