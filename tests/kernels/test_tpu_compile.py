"""Every real shape of both kernels compiles for every chip, without a TPU.

A few in each run, on the smallest slice of each chip and, through the ops' own entries, on a mesh;
all of them with `make kernels-all`.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from bench import marks, measure, own, programs, tpu_compiler
from bench.programs import Program
from tests import tpu_compile
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.vision_attention import blocks as vision_blocks
from tpu_vl.kernels.vision_attention import cases as vision_cases

pytestmark = pytest.mark.skipif(
    not tpu_compile.have_libtpu(), reason="libtpu, the TPU compiler, is not installed"
)

DECODE = next(n for n in marks.DECODE if paged_cases.REAL[n].page_size == 64)
CHOSEN = (marks.FULL, DECODE)
ON_A_MESH = (*CHOSEN, *marks.PREFILL)
OTHER_CHIPS = ("v5e", "v5p", "tpu7x")

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

    shape = paged.cache_shape(8192, case.page_size, case.num_kv_heads, case.width, "pallas", dtype=case.cache_dtype, mesh=mesh)
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
    if name in vision_cases.REAL:
        compiled, page_bytes = compile_vision(vision_cases.REAL[name])
    else:
        compiled, page_bytes = compile_paged(paged_cases.REAL[name])
    text, memory = compiled.as_text(), compiled.memory_analysis()
    print(json.dumps({
        "name": name,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": len(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute)[-a-z]*[(]", text)),
        "temp_bytes": memory.temp_size_in_bytes,
        "page_bytes": page_bytes,
    }))
"""  # noqa: E501


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Compilers are processes of their own: two run side by side."""
    with ThreadPoolExecutor(2) as found:
        yield found


@pytest.fixture(scope="module")
def on_a_mesh(pool: ThreadPoolExecutor) -> Future[str]:
    """What the script says of ON_A_MESH."""
    return pool.submit(tpu_compile.run_script, SCRIPT, *ON_A_MESH)


@pytest.fixture(scope="module")
def refused_by(pool: ThreadPoolExecutor) -> dict[str, Future[dict[str, str]]]:
    """Those of CHOSEN that do not compile, of each other chip."""
    return {chip: pool.submit(refused, CHOSEN, chip) for chip in OTHER_CHIPS}


def test_on_a_mesh_one_kernel_without_collectives_or_a_copy_of_the_pages(
    on_a_mesh: Future[str], refused_by: object
) -> None:
    del refused_by  # has begun beside it
    found = [json.loads(line) for line in on_a_mesh.result().splitlines()]
    assert [f["name"] for f in found] == list(ON_A_MESH)
    for f in found:
        assert f["kernels"] == 1, f
        assert f["collectives"] == 0, f
        if f["page_bytes"]:
            assert f["temp_bytes"] < f["page_bytes"] / 8, f


def on_one_device(names: Iterable[str], chip: str) -> dict[str, Program]:
    """Each case as one device sees it, in the block sizes of that chip."""
    found = {}
    for name in names:
        if name in vision_cases.REAL:
            case = measure.one_device(vision_cases.REAL[name])
            sizes = (case.num_rows, case.num_heads, case.width, case.dtype)
            blocks = vision_blocks.pick_blocks(*sizes, CHIPS[chip])
            found[name] = own.vision_program(case, blocks)
        else:
            case = measure.one_device(paged_cases.REAL[name])
            found[name] = own.paged_program(case, own.paged_blocks_of(case, CHIPS[chip]))
    return found


def refused(names: Iterable[str], chip: str) -> dict[str, str]:
    """The cases that do not compile, with the compiler's words; equal programs compile once."""
    asked = on_one_device(names, chip)
    different = {json.dumps([p.build, p.sizes]): p for p in asked.values()}
    said = dict(zip(different, programs.failures(list(different.values()), chip), strict=True))
    return {n: w for n, p in asked.items() if (w := said[json.dumps([p.build, p.sizes])])}


@pytest.mark.parametrize("chip", OTHER_CHIPS)
def test_chosen_shapes_compile(chip: str, refused_by: dict[str, Future[dict[str, str]]]) -> None:
    assert refused_by[chip].result() == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chip", sorted(tpu_compiler.TOPOLOGIES))
def test_all_real_shapes_compile(chip: str) -> None:
    assert refused([*vision_cases.REAL, *paged_cases.REAL], chip) == {}


def test_kernels_that_do_not_compile_are_reported() -> None:
    """One is too large for the chip; of the other's operations the compiler lacks one."""
    sizes = {"num_rows": 1 << 18, "num_heads": 1, "width": 128, "dtype": "bfloat16"}
    blocks = {"form": "rows", "block_q": 256, "block_kv": 256, "heads": 1, "unroll": 1}
    wide = measure.one_device(paged_cases.REAL["qwen3_5_27b_decode_4096_tp1"])
    rival = measure.paged_subject("wide", wide, CHIPS["v6e"]).rivals[0]
    large, lacking = programs.failures(
        [Program("matmuls.matmuls_call", sizes | blocks), rival.program], "v6e"
    )
    assert "vmem" in large.lower(), large
    assert "Not Implemented" in lacking, lacking
