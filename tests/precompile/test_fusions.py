"""Fusions of a hand-written executable, counted by hand, and of one that the compiler wrote."""

import json
from pathlib import Path

import pytest

from tests import tpu_compile
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.precompile.fusions import SMALL_S, Fusion, flagged_fusions, profile
from tpu_vl.precompile.hlo import parse_module

V6E = CHIPS["v6e"]


TEXT = (Path(__file__).parents[1] / "data" / "tpu_executable.txt").read_text()


def by_name(name: str) -> Fusion:
    return next(f for f in profile(TEXT, V6E).fusions if f.name == name)


def test_bytes_are_operands_and_results_and_flops_those_of_the_product() -> None:
    fusion = by_name("fusion.10")
    num_bytes = 2 * (64 * 4096 + 4096 * 3072 + 64 * 3072)
    assert (fusion.num_bytes, fusion.flops) == (num_bytes, 2 * 64 * 4096 * 3072)
    by_bytes, by_flops = num_bytes / 1638e9, fusion.flops / 918e12
    assert by_bytes > by_flops
    assert fusion.roofline_cycles == pytest.approx(by_bytes * 1.75e9)
    assert fusion.ratio == pytest.approx(40000 / (by_bytes * 1.75e9))


def test_a_window_counts_the_positions_that_meet_its_input_only() -> None:
    # The compiler writes a product over heads as a window of 8 on one position, padded by 7.
    assert by_name("heads.12").flops == 2 * 64 * 4096 * 8 * 128


def test_what_is_gathered_or_updated_in_place_counts_by_its_rows() -> None:
    ids = 64 * 4
    assert by_name("rows.14").num_bytes == 2 * (2 * 64 * 512) + ids
    assert by_name("set.6").num_bytes == 2 * (2 * 1000) + 4


def test_slow_fusions_are_flagged_and_equal_layers_come_as_one() -> None:
    flagged = flagged_fusions(TEXT, V6E)
    assert [(f.name, f.count, f.scope) for f in flagged] == [
        ("fusion.10", 2, "jit(f)/layer/mlp/dot"),
        ("set.6", 1, "jit(f)/clear"),
    ]
    assert flagged[0].share == pytest.approx(76000 / profile(TEXT, V6E).cycles)


def test_sums_take_loops_once_and_the_longer_branch_and_name_what_has_no_estimate() -> None:
    found = profile(TEXT, V6E)
    assert found.cycles == 40000 + 36000 + 9000 + 2120 + 12000 + 900
    assert found.small_cycles == 2120 + 900
    assert 2120 < SMALL_S * V6E.clock_hz < 9000
    assert (found.num_kernels, found.num_collectives, found.num_loops) == (1, 1, 1)
    assert found.unestimated_bytes == by_name("rows.14").num_bytes


def test_a_faster_chip_flags_what_a_slower_one_does_not() -> None:
    assert "fusion.10" in [f.name for f in flagged_fusions(TEXT, CHIPS["tpu7x"])]
    assert "fusion.10" not in [f.name for f in flagged_fusions(TEXT, CHIPS["v5e"])]


def test_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        parse_module("HloModule nothing\n")


LIVE = """
import json
import jax, jax.numpy as jnp
from tests.tpu_compile import on, tpu_topology_mesh
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.precompile.fusions import profile

mesh = tpu_topology_mesh("v6e:2x2", tp=4)
def array(*shape):
    return on(jax.ShapeDtypeStruct(shape, jnp.bfloat16), mesh, *[None] * len(shape))
compiled = jax.jit(jnp.matmul).lower(array(1024, 4096), array(4096, 2048)).compile()
found = profile(compiled.as_text(), CHIPS["v6e"])
products = [f for f in found.fusions if f.flops]
print(json.dumps({
    "flops": [f.flops for f in products], "ratios": [f.ratio for f in products],
    "bytes": [f.num_bytes for f in products], "roofline": products[0].roofline_cycles,
    "flagged": [f.name for f in found.flagged], "cycles": found.cycles,
}))
"""


@pytest.mark.skipif(not tpu_compile.have_libtpu(), reason="libtpu is not installed")
def test_a_product_of_a_real_executable_has_its_bytes_and_flops() -> None:
    found = json.loads(tpu_compile.run_script(LIVE).splitlines()[-1])
    assert found["flops"] == [2 * 1024 * 4096 * 2048]
    assert found["bytes"] == [2 * (1024 * 4096 + 4096 * 2048 + 1024 * 2048)]
    assert 1 < found["ratios"][0] < 2, found
    assert bool(found["flagged"]) == (found["ratios"][0] > 1.2)
    assert found["cycles"] >= found["roofline"]
