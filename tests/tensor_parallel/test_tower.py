"""The tower on several devices: both modes, slices, capacities, and where the patches lie."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.tensor_parallel import model
from tests.tensor_parallel.model import FAMILY, POOL_ROWS, ROW_BLOCK, compiled, engine_config
from tpu_vl.engine import layout
from tpu_vl.engine.batch import build_call
from tpu_vl.engine.runner import PlacedCall, Runner
from tpu_vl.engine.state import abstract_state
from tpu_vl.engine.tower import TowerCall
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile import buckets
from tpu_vl.precompile.programs import Program, make_backend, programs
from tpu_vl.vision.pack import FramePlan, pack_frames
from tpu_vl.weights.random import random_params

FRAMES = ((4, 6), (8, 2), (2, 4), (6, 2), (8, 8))  # the first call ends inside a block
DEPTH = 3


class OneTower:
    """The tower's program of one capacity on so many devices, with weights."""

    def __init__(self, num_shards: int, mode: str, capacity: int = 0, heads: int = 24) -> None:
        self.cfg = model.model_config(num_shards, mode, tower_heads=heads)
        self.sizes = engine_config(num_shards, mode)
        if capacity:
            self.sizes = replace(self.sizes, patch_capacities=(capacity,), row_steps=())
        mesh = make_mesh(num_shards)
        backend = model.backend_of(mesh, self.sizes)
        self.state = abstract_state(FAMILY, self.cfg, self.sizes, backend)
        name = layout.encode_name(self.sizes.patch_capacities[-1])
        listed = programs(FAMILY, self.cfg, self.sizes, backend)
        self.program = next(p for p in listed if p.name == name)
        self.table = {name: compiled(self.program)}
        self.params = random_params(FAMILY, self.cfg, mesh, "float32", seed=0)

    def runner(self) -> Runner:
        """A runner whose state is zero."""
        state = jax.tree.map(
            lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), self.state
        )
        return Runner(self.table, self.params, FAMILY.head(self.params), state)

    def calls(self) -> list[TowerCall]:
        """The packed calls of all test frames; rows scattered over the pool."""
        plans = [FramePlan(key=i, grid_h=h, grid_w=w) for i, (h, w) in enumerate(FRAMES)]
        order = np.random.default_rng(1).permutation(POOL_ROWS).astype(np.int32)
        rows = np.split(order, np.cumsum([p.num_patches // 4 for p in plans]))
        rng = np.random.default_rng(2)
        patches = [
            rng.integers(0, 256, (p.num_patches, model.PATCH_WIDTH), np.uint8) for p in plans
        ]
        geometry = FAMILY.geometry(self.cfg)
        packed = pack_frames(plans, self.sizes.patch_capacities, geometry.num_bins)
        return [
            TowerCall(c, [patches[f.key] for f in c.frames], [rows[f.key] for f in c.frames], 1.0)  # pyright: ignore[reportArgumentType,reportCallIssue]
            for c in packed
        ]

    def place(self, runner: Runner, call: TowerCall) -> PlacedCall:
        """A call's inputs on the devices."""
        return runner.place(*build_call(call, FAMILY.geometry(self.cfg)))

    def pool(self, edges: Sequence[int] = (0, DEPTH)) -> np.ndarray:
        """The pool after all frames, each call in slices with these edges."""
        runner = self.runner()
        for call in self.calls():
            placed = self.place(runner, call)
            for first, end in itertools.pairwise(edges):
                runner.encode(placed, first, end)
        assert runner._state.pool_RJD is not None
        return np.asarray(runner._state.pool_RJD)


@cache
def tower(num_shards: int, mode: str, heads: int = 24) -> OneTower:
    return OneTower(num_shards, mode, heads=heads)


@pytest.mark.parametrize("num_shards", [2, 8])
def test_both_modes_write_the_rows_of_one_device(num_shards: int) -> None:
    want = tower(1, "weights").pool()
    assert np.count_nonzero(np.abs(want).max(axis=(1, 2))) == sum(h * w // 4 for h, w in FRAMES)
    for mode in ("weights", "data"):
        got = tower(num_shards, mode).pool()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        assert got.shape[0] == POOL_ROWS + 1
        assert not got[-1].any(), "the row that text reads"


@pytest.mark.parametrize("num_shards", [3, 6])
def test_heads_that_do_not_divide_work_in_data_mode(num_shards: int) -> None:
    want = tower(1, "weights", heads=16).pool()
    got = tower(num_shards, "data", heads=16).pool()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["weights", "data"])
@pytest.mark.parametrize("edges", [(0, 1, 2, 3), (0, 2, 3)])
def test_slices_of_layers_write_the_same_rows(mode: str, edges: tuple[int, ...]) -> None:
    whole = tower(2, mode).pool()
    np.testing.assert_allclose(tower(2, mode).pool(edges), whole, rtol=0, atol=1e-6)


def collectives(one: OneTower) -> list[str]:
    """The lines of a compiled program in which values cross devices."""
    (executable,) = one.table.values()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    lines = executable.as_text().splitlines()
    return [
        line for line in lines if any(f" {k}(" in line or f" {k}-start(" in line for k in kinds)
    ]


def test_no_collective_inside_a_tower_in_data_mode() -> None:
    assert any("/mlp/" in line for line in collectives(tower(2, "weights")))
    crossing = collectives(tower(2, "data"))
    assert len(crossing) == 3, "one for each column of a pool row"
    for line in crossing:
        assert "gather_rows" in line
        assert "all-to-all" in line
        shapes = re.findall(r"f32\[([\d,]+)\]", line)
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
        assert sum(sizes[:2]) == ROW_BLOCK // 4 * 40, "a block of a bin's rows, not the whole bin"


@pytest.mark.parametrize("mode", ["weights", "data"])
def test_patches_lie_over_the_devices_in_whole_merge_groups(mode: str) -> None:
    one = tower(2, mode)
    (call, *_) = one.calls()
    runner = one.runner()
    placed = one.place(runner, call).patches_PW
    assert isinstance(placed.sharding, NamedSharding)
    assert placed.sharding.spec == PartitionSpec("model", None)
    assert one.program.arguments[2].sharding.spec == PartitionSpec("model", None)
    for shard in placed.addressable_shards:
        assert shard.data.shape == (placed.shape[0] // 2, model.PATCH_WIDTH)
        assert shard.index[0].start % 4 == shard.data.shape[0] % 4 == 0


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("data", [False, True])
def test_every_program_splits_its_patches_evenly(num_shards: int, data: bool) -> None:
    cfg = model.model_config(num_shards, "data" if data else "weights")
    bins = FAMILY.geometry(cfg).num_bins
    plan = buckets.patch_plan(4_096, 64, num_shards, 2, num_bins=bins, row_steps=4)
    sizes = replace(
        engine_config(num_shards, "data" if data else "weights"),
        patch_capacities=plan.capacities,
        row_block=plan.row_block,
        row_steps=plan.row_steps,
    )
    listed = programs(FAMILY, cfg, sizes, make_backend(make_mesh(num_shards), sizes))
    encodes = [p for p in listed if p.name.startswith("encode/")]
    assert len(encodes) == len(plan.capacities) > 2
    for program in encodes:
        patches = program.arguments[2]
        local = patches.sharding.shard_shape(patches.shape)
        assert local[0] * num_shards == patches.shape[0]
        assert local[0] % 4 == 0


def test_the_same_picture_in_six_capacities_gives_equal_rows() -> None:
    pools = [OneTower(2, "weights", capacity=64 + 32 * i).pool() for i in range(6)]
    for pool in pools[1:]:  # equal but for the order of float32 sums
        np.testing.assert_allclose(pool, pools[0], rtol=0, atol=1e-5)


def large_call(num_shards: int) -> Program:
    """The call of 65,536 patches of a narrow tower with wide patches."""
    raw = model.config_dict(tower_heads=4)
    raw["vision_config"] |= {"patch_size": 16, "hidden_size": 16}
    cfg = FAMILY.shard(FAMILY.parse_config(raw), num_shards, "weights")
    sizes = replace(
        engine_config(num_shards, "weights"),
        patch_capacities=(65_536,),
        row_block=1_024,
        row_steps=(1,),
        pool_rows=16_384,
    )
    listed = programs(FAMILY, cfg, sizes, make_backend(make_mesh(num_shards), sizes))
    return next(p for p in listed if p.name == "encode/65536")


def local_bytes(arguments: Any) -> int:
    """Bytes of the arguments on one device."""
    leaves = jax.tree.leaves(arguments)
    return sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in leaves)


def test_memory_of_the_largest_call_holds_patches_once_and_never_whole_as_floats() -> None:
    pixels = 65_536 * 1_536
    program = large_call(4)
    memory = compiled(program).memory_analysis()
    assert local_bytes(program.arguments[2]) == pixels // 4
    # Unused arguments may be left out: the device holds no more than its own share.
    assert memory.argument_size_in_bytes <= local_bytes(program.arguments)
    assert memory.temp_size_in_bytes < pixels // 4, "less than the device's patches as bytes"
