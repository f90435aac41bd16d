"""The roofline formulas: hand-made cases, limits, and which way each size moves the time."""

import dataclasses

import pytest

from tpu_vl.kernels.chips import CHIPS, chip_of
from tpu_vl.precompile import estimate
from tpu_vl.precompile.estimate import Cost, DecoderSizes, TowerSizes

V6E = CHIPS["v6e"]
TOWER = TowerSizes(
    depth=27,
    width=1152,
    num_heads=16,
    head_dim=72,
    mlp_width=4304,
    patch_width=1536,
    merge_cells=4,
    out_width=4096,
    num_mergers=4,
)
DENSE = DecoderSizes(
    num_layers=36,
    width=4096,
    vocab_size=151_936,
    dense_values=6_946_000_000,
    num_attention_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
LADDER = (4, 16, 64, 256, 1024, 2048)


def test_a_part_takes_the_longer_of_memory_and_arithmetic() -> None:
    second_of_memory = Cost(hbm_bytes=V6E.hbm_bytes_per_s)
    assert second_of_memory.seconds(V6E) == pytest.approx(1)
    assert (second_of_memory + Cost(flops=2 * V6E.bf16_flops)).seconds(V6E) == pytest.approx(2)
    assert (second_of_memory * 3).seconds(V6E) == pytest.approx(3)


def test_collectives_cost_bytes_and_hops() -> None:
    assert estimate.all_reduce_s(10**9, 1, V6E) == 0
    # A ring of four passes 3/4 of the data twice; v6e gives a ring 200 GB/s in each direction.
    assert estimate.ring_bytes_per_s(V6E) == 200e9
    moved_s = 2 * 0.75 * 10**9 / 200e9
    assert estimate.all_reduce_s(10**9, 4, V6E) == pytest.approx(moved_s + 4 * estimate.HOP_S)
    assert estimate.all_reduce_s(0, 4, V6E) == pytest.approx(4 * estimate.HOP_S)


def test_decode_of_one_sequence_is_the_weights_over_the_bandwidth() -> None:
    found = estimate.decode_step(DENSE, 1, 1, V6E, 4, LADDER)
    assert found is not None
    head = DENSE.vocab_size * DENSE.width
    weights_us = 2 * (DENSE.dense_values + head) / 4 / V6E.hbm_bytes_per_s * 1e6
    assert found.roofline_us == pytest.approx(weights_us, rel=1e-3)
    assert found.estimate_us > found.roofline_us


def test_prefill_is_bound_by_arithmetic() -> None:
    found = estimate.prefill_step(DENSE, 1024, V6E, 1, LADDER, 256)
    assert found is not None
    flops_us = 2 * DENSE.dense_values * 1024 / V6E.bf16_flops * 1e6
    assert found.roofline_us == pytest.approx(flops_us, rel=0.1)
    assert found.estimate_us == pytest.approx(found.roofline_us, rel=0.2)


@pytest.mark.parametrize("num_sequences", [1, 5, 16, 64, 200, 256])
def test_an_estimate_is_never_below_its_roofline(num_sequences: int) -> None:
    for chip in CHIPS.values():
        for num_devices in (1, 2, 4, 8):
            found = estimate.decode_step(DENSE, num_sequences, 2048, chip, num_devices, LADDER)
            assert found is not None
            assert found.estimate_us >= found.roofline_us > 0


def test_no_program_no_estimate() -> None:
    assert estimate.decode_step(DENSE, 4096, 1, V6E, 1, LADDER) is None
    assert estimate.prefill_step(DENSE, 4096, V6E, 1, LADDER, 256) is None
    assert estimate.capacity_of(17, LADDER) == 64


def test_a_padded_step_costs_more_than_a_full_one_of_its_size() -> None:
    exact = estimate.prefill_step(DENSE, 1024, V6E, 1, LADDER, 256)
    padded = estimate.prefill_step(DENSE, 1025, V6E, 1, LADDER, 256)
    assert exact is not None
    assert padded is not None
    assert padded.estimate_us > 1.8 * exact.estimate_us
    assert padded.roofline_us < 1.01 * exact.roofline_us


def test_experts_are_read_as_far_as_tokens_visit_them() -> None:
    sparse = dataclasses.replace(
        DENSE, num_experts=128, experts_per_token=8, expert_values=50_000_000
    )
    assert sparse.experts_read(1) == pytest.approx(8)
    assert 64 < sparse.experts_read(16) < 128
    assert sparse.experts_read(10_000) == pytest.approx(128)
    assert DENSE.experts_read(16) == 0


def test_kv_heads_fewer_than_devices_are_read_whole() -> None:
    cached = [estimate.decode_step(DENSE, 256, 30_000, V6E, n, LADDER) for n in (8, 16)]
    assert cached[0] is not None
    assert cached[1] is not None
    # Twice the devices halve the weights, not the cache: each reads one whole head.
    assert cached[1].roofline_us > 0.9 * cached[0].roofline_us


def test_the_tower_follows_patches_frames_and_mode() -> None:
    def seconds(patches: int, frames: int, mode: estimate.TowerMode, tp: int = 4) -> float:
        return estimate.tower_layer_seconds(TOWER, patches, frames, V6E, tp, mode)

    # Sixteen frames attend a sixteenth of what one of their size does.
    assert seconds(65_536, 1, "weights") > 2 * seconds(65_536, 16, "weights")
    # Whole frames on their own device need no collectives; one frame leaves three devices idle.
    assert seconds(16_384, 16, "data") < seconds(16_384, 16, "weights")
    assert seconds(65_536, 1, "data") > seconds(65_536, 1, "weights")
    assert seconds(4_096, 4, "weights", tp=1) == seconds(4_096, 4, "data", tp=1)
    assert estimate.tower_mode(TOWER, 65_536, 1, V6E, 4) == "weights"
    assert estimate.tower_mode(TOWER, 16_384, 16, V6E, 4) == "data"
    assert estimate.tower_mode(TOWER, 65_536, 1, V6E, 3) == "data", "16 heads over 3 devices"


def test_a_layer_is_its_operations_where_they_bind() -> None:
    one = estimate.tower_layer_seconds(TOWER, 65_536, 64, V6E, 1, "weights")
    linear = 2 * (4 * 1152**2 + 2 * 1152 * 4304) * 65_536
    attention = 4 * 16 * 128 * 65_536 * 1_024  # heads of 72 fill 128 lanes
    assert one == pytest.approx((linear + attention) / V6E.bf16_flops)


def test_every_chip_is_found_by_what_jax_calls_it() -> None:
    for chip in CHIPS.values():
        assert chip_of(chip.kind) is chip
