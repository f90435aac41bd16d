"""The reader of the compiler's schedules: on a schedule written by hand, and on a live compile."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import schedule, tpu_compiler
from bench.schedule import Dump, KernelProfile
from tests.tpu_compile import have_libtpu
from tpu_vl.kernels.chips import CHIPS

DATA = Path(__file__).parent / "data"
COUNTS = {"full_block": 10}


def dump() -> Dump:
    texts = [(DATA / f"{name}.txt").read_text() for name in ("schedule", "utilization", "stored")]
    return Dump("two_loops.1", *texts)


def read(text: Dump | None = None) -> KernelProfile:
    return schedule.read_kernel(text or dump(), CHIPS["v6e"])


def test_regions_by_jumps() -> None:
    found = [(r.kind, r.start, r.end, r.depth, r.trips, r.labels) for r in read().regions]
    assert found == [
        ("kernel", 0, 28, 0, None, ()),
        ("loop", 1, 27, 1, 6, ()),
        ("branch", 8, 20, 2, None, ()),
        ("loop", 8, 19, 3, None, ("full_block",)),
    ]


def test_every_cycle_is_in_one_region() -> None:
    kernel = read()
    assert [r.cycles for r in kernel.regions] == [2, 14, 1, 11]
    assert sum(r.cycles for r in kernel.regions) == 28
    assert kernel.stored_bundles == 3


def test_slots_and_matrix_units() -> None:
    kernel = read()
    inner = kernel.regions[3]
    # Two bfloat16 matmuls of 16 rows by 256 x 256, on v6e 8 cycles of one of two units each.
    assert inner.slots["mxu"] == 16
    assert kernel.share(inner, "mxu") == pytest.approx(16 / (2 * 11))
    assert kernel.share(inner, "valu") == pytest.approx(1 / (4 * 11))
    assert kernel.share(inner, "spill") == pytest.approx(1 / (2 * 11))
    assert inner.slots["vpop"] == 2
    assert inner.slot_bundles["vpop"] == 1
    assert [r.dma_starts for r in kernel.regions] == [0, 1, 0, 0]


def test_cycles_join_visits() -> None:
    kernel = read()
    assert kernel.visits(COUNTS) == [1, 6, 6, 10]
    assert kernel.cycles(COUNTS) == 2 + 6 * 14 + 6 * 1 + 10 * 11
    assert kernel.slot_share(COUNTS, "mxu") == pytest.approx(160 / (2 * 202))
    assert kernel.slot_share(COUNTS, "valu") == pytest.approx((10 * 1 + 6 * 4) / (4 * 202))
    assert kernel.num_dma_starts(COUNTS) == 6


def test_a_loop_without_trips_or_name_is_refused() -> None:
    unnamed = replace(dump(), schedule=dump().schedule.replace("TraceMeStart(", "Other("))
    with pytest.raises(ValueError, match=r"loop at bundle 8 .* open one in its body"):
        read(unnamed).cycles(COUNTS)


def test_a_loop_that_only_moves_data_has_assumed_trips() -> None:
    unnamed = replace(
        dump(),
        schedule=dump().schedule.replace("TraceMeStart(", "Other(").replace("vmatmul", "vload"),
        utilization=re.sub(r"^\d \d \d ", "0 0 0 ", dump().utilization, flags=re.MULTILINE),
    )
    assert read(unnamed).visits(COUNTS) == [1, 6, 6, 6 * schedule.COPY_TRIPS]


def test_a_scope_that_was_not_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="'full_block' is in no count"):
        read().cycles({"other": 3})


def test_a_scope_in_two_regions_is_refused() -> None:
    text = dump().schedule.replace(
        "0x13   : > { ", "0x13   : > { %9 = vtrace 1 /* TraceMeStart(full_block) [ */  ;;  "
    )
    with pytest.raises(ValueError, match="'full_block' opens in 2 regions"):
        read(replace(dump(), schedule=text)).cycles(COUNTS)


def test_a_scope_that_opens_twice_in_a_body_counts_half() -> None:
    text = dump().schedule.replace(
        "0xd   : >> { ", "0xd   : >> { %9 = vtrace 1 /* TraceMeStart(full_block) [ */  ;;  "
    )
    assert read(replace(dump(), schedule=text)).visits(COUNTS)[3] == 5


def test_files_that_disagree_are_refused() -> None:
    short = dump().utilization.rstrip().rpartition("\n")[0]
    with pytest.raises(ValueError, match="28 bundles but slots of 27"):
        read(replace(dump(), utilization=short))
    missing = dump().schedule.replace("  0x10   :  {}\n", "")
    with pytest.raises(ValueError, match="bundle 0x11 follows 16 bundles"):
        read(replace(dump(), schedule=missing))


def test_names_come_only_from_the_same_program() -> None:
    kernel, named = read(), read()
    for region in kernel.regions:
        region.labels = ()
    assert schedule.with_labels(kernel, named).regions[3].labels == ("full_block",)
    other_trips = read()
    other_trips.regions[1].trips = 7
    with pytest.raises(ValueError, match="4 regions, but 4 with named scopes kept"):
        schedule.with_labels(read(), other_trips)
    unknown = read()
    unknown.regions[1].trips = None
    assert schedule.with_labels(unknown, read()).regions[1].trips == 6
    other = replace(named, regions=named.regions[:3])
    with pytest.raises(ValueError, match="4 regions, but 3 with named scopes kept"):
        schedule.with_labels(read(), other)


def test_a_profile_survives_json() -> None:
    kernel = schedule.with_labels(read(), read())
    found = schedule.from_json(json.loads(json.dumps(schedule.to_json(kernel))))
    assert found == kernel
    assert found.cycles(COUNTS) == kernel.cycles(COUNTS)


def test_the_table_names_each_region() -> None:
    lines = read().table().splitlines()
    assert "28 cycles" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["kernel", "loop", "branch", "loop"]
    assert "full_block" in lines[-1]
    assert "data" in lines[-1]


LIVE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from bench import tpu_compiler

def kernel(n_ref, x_ref, y_ref, out_ref):
    with jax.named_scope("step"):
        out_ref[...] = jnp.zeros_like(out_ref)

        def product(j, carry):
            with jax.named_scope("product"):
                out_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
            return carry

        jax.lax.fori_loop(0, n_ref[pl.program_id(0)], product, 0)

def run(n, x, y):
    block = pl.BlockSpec((128, 256), lambda i, n: (i, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(8,),
        in_specs=[block, pl.BlockSpec((256, 256), lambda i, n: (0, 0))], out_specs=block)
    shape = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    return pl.pallas_call(kernel, grid_spec=grid, out_shape=shape, name="live")(n, x, y)

place = jax.sharding.SingleDeviceSharding(tpu_compiler.device(sys.argv[1]))
shapes = [((8,), jnp.int32), ((1024, 256), jnp.bfloat16), ((256, 256), jnp.bfloat16)]
shapes = [jax.ShapeDtypeStruct(*s, sharding=place) for s in shapes]
jax.jit(run).lower(*shapes).compile()
"""


@pytest.mark.skipif(not have_libtpu(), reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize("chip", ["v6e", pytest.param("tpu7x", marks=pytest.mark.slow)])
def test_a_live_compile(chip: str) -> None:
    topology = tpu_compiler.TOPOLOGIES[chip]
    (kernel,) = schedule.profile(LIVE, topology, topology)
    assert kernel.name == "live.1"
    (grid,) = (r for r in kernel.regions if r.kind == "loop" and r.trips is not None)
    assert grid.trips == 10  # 8 steps and the pipeline's 2
    (product,) = (r for r in kernel.regions if "product" in r.labels)
    assert product.kind == "loop"
    assert product.trips is None
    # 128 rows of 256 by 256 x 256 at the peak of all units.
    peak_cycles = 2 * 128 * 256 * 256 * kernel.chip.clock_hz / kernel.chip.bf16_flops
    assert product.slots["mxu"] / kernel.capacity["mxu"] == pytest.approx(peak_cycles, rel=0.01)
    assert product.cycles > peak_cycles
    counts = {"step": 8, "product": 36}
    assert kernel.cycles(counts) - kernel.cycles(counts | {"product": 35}) == product.cycles
