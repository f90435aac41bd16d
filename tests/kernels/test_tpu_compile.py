"""The TPU path of both ops compiles for v6e:2x2 at Qwen3-VL-8B's real shapes, without a TPU."""

import json

import pytest

from tests import tpu_compile

pytestmark = pytest.mark.skipif(
    not tpu_compile.have_libtpu(), reason="libtpu, the TPU compiler, is not installed"
)

SCRIPT = """
import functools, json, re, sys
import jax, jax.numpy as jnp
from tests.tpu_compile import on, tpu_topology_mesh
from tpu_vl.kernels.paged_attention import api as paged, cases as paged_cases
from tpu_vl.kernels.vision_attention import api as vision, cases as vision_cases

S = jax.ShapeDtypeStruct
mesh = tpu_topology_mesh("v6e:2x2", tp=4)


def compile_vision(case):
    qkv = on(S((case.num_rows, case.num_heads, case.width), case.dtype), mesh, None, "model", None)
    bounds = on(S((2, case.num_rows), jnp.int32), mesh)
    run = functools.partial(vision.vision_attention, scale=case.width**-0.5, implementation="pallas", mesh=mesh)
    return jax.jit(run).lower(qkv, qkv, qkv, bounds, on(S((), jnp.int32), mesh)).compile(), 0


def compile_paged(case):
    def new(heads):
        return on(S((case.num_tokens, heads, case.width), case.dtype), mesh, None, "model", None)

    shape = paged.cache_shape(8192, case.page_size, case.num_kv_heads, case.width, "pallas")
    pages = on(S(shape, case.cache_dtype), mesh, *paged.cache_spec(case.num_kv_heads, mesh))
    addresses = [
        on(S(shape, jnp.int32), mesh)
        for shape in ((case.num_seqs, case.max_pages), (case.num_seqs + 1,), (case.num_seqs,))
    ]
    run = functools.partial(paged.paged_attention, scale=case.width**-0.5, implementation="pallas", mesh=mesh)
    keys = new(case.num_kv_heads)
    step = jax.jit(run, donate_argnums=3)
    return step.lower(new(case.num_heads), keys, keys, pages, *addresses).compile(), pages.size * 2 // 4


for name in sys.argv[1:]:
    if name in vision_cases.QWEN3_VL_8B:
        compiled, page_bytes = compile_vision(vision_cases.QWEN3_VL_8B[name])
    else:
        compiled, page_bytes = compile_paged(paged_cases.QWEN3_VL_8B[name])
    text, memory = compiled.as_text(), compiled.memory_analysis()
    print(json.dumps({
        "name": name,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": len(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute)[-a-z]*[(]", text)),
        "temp_bytes": memory.temp_size_in_bytes,
        "page_bytes": page_bytes,
    }))
"""  # noqa: E501


def test_real_shapes_compile_to_one_kernel_without_collectives_or_a_copy_of_the_pages() -> None:
    names = ("qwen3_vl_8b_4096", "qwen3_vl_8b_decode", "qwen3_vl_8b_prefill")
    found = [json.loads(line) for line in tpu_compile.run_script(SCRIPT, *names).splitlines()]
    assert [f["name"] for f in found] == list(names)
    for f in found:
        assert f["kernels"] == 1, f
        assert f["collectives"] == 0, f
        if f["page_bytes"]:
            assert f["temp_bytes"] < f["page_bytes"] / 8, f
