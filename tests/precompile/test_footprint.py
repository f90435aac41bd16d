"""Bytes of a device: the compiler's tiles, shards of real trees, and the pages that are left."""

import json

import pytest

from tests import tpu_compile
from tests.precompile.named import model_on
from tpu_vl.precompile import footprint
from tpu_vl.precompile.footprint import Footprint, device_bytes
from tpu_vl.precompile.programs import make_backend
from tpu_vl.precompile.sizes import Weight

# (shape, dtype, bytes): what libtpu's compiler gives as the size of such an argument on a v6e.
MEASURED = [
    ((4096, 8, 128), "bfloat16", 8_388_608),
    ((4096, 2, 128), "bfloat16", 2_097_152),
    ((4096, 1, 128), "bfloat16", 1_048_576),
    ((27, 1152, 3, 4, 72), "bfloat16", 53_747_712),
    ((27, 3, 4, 72), "bfloat16", 82_944),
    ((27, 1152), "bfloat16", 73_728),
    ((27, 1152, 1076), "bfloat16", 67_184_640),
    ((1000, 64, 1, 128), "bfloat16", 16_384_000),
    ((34_816, 5, 512), "bfloat16", 178_257_920),
    ((1000, 3), "bfloat16", 8_192),
    ((1, 7), "bfloat16", 512),
    ((256, 300), "int32", 311_296),
    ((300, 8), "float32", 12_288),
    ((3, 5, 7), "float32", 10_240),
    ((38, 4864), "float32", 778_240),
    ((256, 151_936), "uint16", 77_791_232),
    ((16_384, 1536), "uint8", 25_165_824),
    ((4304, 1152), "int8", 4_958_208),
    ((1000, 64, 16, 128), "float8_e5m2", 131_072_000),
    ((2,), "int32", 512),
    ((256,), "int32", 1_024),
    ((600,), "int32", 4_096),
    ((123_457,), "int32", 495_616),
    ((100,), "bfloat16", 512),
    ((1152,), "bfloat16", 4_096),
]


@pytest.mark.parametrize(("shape", "dtype", "num_bytes"), MEASURED)
def test_arrays_take_what_the_compiler_gives_them(
    shape: tuple[int, ...], dtype: str, num_bytes: int
) -> None:
    assert device_bytes(shape, dtype) == num_bytes


def test_elsewhere_arrays_are_not_padded() -> None:
    assert device_bytes((3, 5, 7), "float32", "cpu") == 3 * 5 * 7 * 4
    assert device_bytes((), "int32", "cpu") == 4


def of(tp: int, **flags) -> Footprint:
    model = model_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=tp, **flags)
    backend = make_backend(model.mesh, model.engine_config)
    return footprint.footprint(model.family, model.cfg, model.engine_config, backend)


def test_weights_are_shared_by_the_devices() -> None:
    one, four = of(1), of(4)
    assert one.weights == pytest.approx(2 * 8_767_123_696, rel=1e-3)
    # Norms, the patch embedding and the position table are whole on every device.
    assert one.weights / 4 < four.weights < one.weights / 4 * 1.01


def test_pages_take_what_the_rest_leaves() -> None:
    model = model_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4)
    e, found = model.engine_config, of(4)
    budget = 0.9 * 31.25 * 2**30
    page = footprint.page_bytes(model.family, model.cfg, e, make_backend(model.mesh, e))
    assert page == 36 * 64 * 2 * 2 * 128 * 2  # layers, tokens, K and V of two heads, lanes, bytes
    assert found.kv == e.num_pages * page
    spare = budget - footprint.RUNTIME_RESERVE_BYTES - found.total
    assert 0 <= spare < page


def test_pages_stop_where_all_sequences_have_theirs() -> None:
    e = model_on(
        "qwen3_vl_2b", "v6e:2x2", tensor_parallel_size=4, max_num_seqs=4, max_model_len=4096
    ).engine_config
    assert e.num_pages == 4 * 4096 // e.page_size


def test_what_does_not_fit_keeps_the_pages_of_one_longest_sequence() -> None:
    e = model_on("qwen3_vl_32b", "v6e:2x2").engine_config
    assert e.num_pages == e.max_pages_per_seq
    given = 5 << 30
    assert given - 36 * 64 * 16 * 128 * 2 < of(1, kv_cache_memory_bytes=given).kv <= given


def test_split_weights_are_counted_by_their_local_shape() -> None:
    weights = [Weight("mlp", "layer", (8, 12), 1, 3), Weight("norm", "layer", (8,))]
    assert footprint.weight_bytes(weights, 4, 2) == (8 * 3 * 3 + 8) * 2
    assert footprint.weight_bytes(weights, 5, 2) == (8 * 12 * 3 + 8) * 2


SCRIPT = """
import json
from tests.precompile.named import bundled_on
from tpu_vl import sized
from tpu_vl.precompile import footprint, targets
from tpu_vl.precompile.compile import compile_program

flags = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "weights"}
described = bundled_on("v6e:2x2", targets.describe_devices, **flags)
named = bundled_on("v6e:2x2", None, **flags)
assert described.engine_config == named.engine_config
seen = set()
for program in sized.list_programs(described):
    kind = program.name.split("/")[0]
    if kind not in seen:
        seen.add(kind)
        analysis = compile_program(program).memory_analysis()
        print(json.dumps({
            "name": program.name,
            "arguments": footprint.tree_bytes(program.arguments, "tpu"),
            "analysed_arguments": analysis.argument_size_in_bytes,
            "outputs": footprint.tree_bytes(program.outputs, "tpu"),
            "analysed_outputs": analysis.output_size_in_bytes,
        }))
"""


@pytest.mark.skipif(not tpu_compile.have_libtpu(), reason="libtpu is not installed")
def test_arguments_are_within_one_percent_of_the_compiler() -> None:
    out = tpu_compile.run_script(SCRIPT)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert {f["name"].split("/")[0] for f in found} >= {"zeros", "encode", "text", "sample"}
    for program in found:
        for part in ("arguments", "outputs"):
            assert program[f"analysed_{part}"] == pytest.approx(program[part], rel=0.01), program
