"""Pages, media cache, tower queue and packed layouts alone: each check can fail."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.toy import CONFIG, GEOMETRY, TEXT_ONLY
from tpu_vl.engine import layout
from tpu_vl.engine.media_cache import MediaCache
from tpu_vl.engine.pages import PageAllocator
from tpu_vl.engine.sequence import Frame
from tpu_vl.engine.tower import TOWER, Tower
from tpu_vl.errors import IntegrityError


def key(i: int) -> tuple[bytes, int]:
    return (bytes([i]) * 32, 0)


def test_pages_are_held_once_and_come_back():
    pages = PageAllocator(5)
    first, second = pages.allocate(2), pages.allocate(3)
    pages.check_integrity([first, second])
    with pytest.raises(IntegrityError, match="1 KV pages asked for, 0 are free"):
        pages.allocate(1)
    with pytest.raises(IntegrityError, match="held twice"):
        pages.check_integrity([first, second, first])
    with pytest.raises(IntegrityError, match="lost"):
        pages.check_integrity([first])
    pages.release(second)
    pages.check_integrity([first])
    assert pages.num_free == 3


def test_the_cache_gives_the_least_recently_used_rows_first():
    cache = MediaCache(10)
    for i in range(3):
        assert cache.pin(key(i), 3, f"r{i}")
        cache.mark_ready(key(i))
    cache.unpin(key(1), "r1")
    cache.unpin(key(0), "r0")
    assert cache.pin(key(1), 3, "again")  # a hit, and used more recently now
    cache.unpin(key(1), "again")
    assert cache.pin(key(3), 4, "r3")  # one row is free: 0, the oldest, goes
    assert cache.entry(key(0)) is None
    assert cache.entry(key(1)) is not None
    assert cache.pin(key(4), 6, "r4") is None  # 2 and 3 are pinned; 1 stays untouched
    assert cache.entry(key(1)) is not None
    cache.check_integrity({"r2", "r3"})
    with pytest.raises(IntegrityError, match="gone"):
        cache.check_integrity({"r2"})


def test_rows_that_were_never_written_are_not_kept():
    cache = MediaCache(4)
    cache.pin(key(0), 4, "r")
    cache.unpin(key(0), "r")
    assert cache.entry(key(0)) is None
    cache.check_integrity(set())


def test_two_media_whose_digests_share_all_but_one_byte_are_two_entries():
    cache = MediaCache(4)
    close = (bytes(31) + b"\x01", 0), (bytes(31) + b"\x02", 0)
    for k in close:
        cache.pin(k, 2, "r")
    assert cache.num_pinned_rows == 4


def make_tower(
    budget: int, num_bins: int = 1, attention_patches: int = 1 << 60
) -> tuple[Tower, MediaCache]:
    cache = MediaCache(64)
    config = replace(
        CONFIG,
        patch_capacities=(16, 64),
        vision_step_patch_layers=budget,
        vision_attention_patches=attention_patches,
    )
    return Tower(cache, engine_config=config, depth=5, num_bins=num_bins), cache


def want(tower: Tower, cache: MediaCache, i: int, side: int) -> None:
    entry = cache.pin(key(i), side * side // 4, "r")
    assert entry is not None
    tower.want(
        Frame(key(i), 0, side * side // 4, (side, side), np.zeros((side * side, 3), np.uint8))
    )


def test_the_tower_packs_frames_and_slices_by_budget():
    tower, cache = make_tower(budget=100)
    for i, side in enumerate([4, 4, 2, 8]):
        want(tower, cache, i, side)
    spans = []
    while tower.busy:
        slices = tower.advance()
        tower.check_integrity()
        spans.append([(s.call.packed.num_patches, s.first_layer, s.end_layer) for s in slices])
    # 36 patches: two layers fit 100; 64 patches: one layer.
    assert spans == [
        [(36, 0, 2)],
        [(36, 2, 4)],
        [(36, 4, 5), (64, 0, 1)],
        [(64, 1, 2)],
        [(64, 2, 3)],
        [(64, 3, 4)],
        [(64, 4, 5)],
    ]
    assert (tower.num_calls, tower.num_frames, tower.num_patches) == (2, 4, 100)
    assert tower.num_padding_patches == 40 - 36  # of a block of 8, not of the capacity


def test_attention_of_a_large_frame_counts_towards_the_budget():
    # One frame of 64 patches costs three times its linear part, 16 frames of 4 about once.
    tower, cache = make_tower(budget=64 * 3 * 2, attention_patches=32)
    want(tower, cache, 0, 8)
    assert [s.end_layer for s in tower.advance()] == [2]
    tower, cache = make_tower(budget=64 * 3 * 2, attention_patches=32)
    for i in range(16):
        want(tower, cache, i, 2)
    assert [s.end_layer for s in tower.advance()] == [5]


def test_bins_take_whole_frames_and_the_busiest_bounds_the_slice():
    tower, cache = make_tower(budget=41, num_bins=2)
    for i, side in enumerate([4, 2, 4, 2, 4]):
        want(tower, cache, i, side)
    (first,) = tower.advance()
    packed = first.call.packed
    assert packed.bins == (0, 1, 1, 0)  # always the emptiest; the fifth frame fits neither
    assert packed.patches_of_bins == (20, 20)
    assert packed.capacity == 64
    assert first.end_layer == 2  # 20 patches a device and layer, not 40
    assert tower.num_padding_patches == 2 * (24 - 20)


def test_a_frame_over_the_budget_runs_one_layer_per_step():
    tower, cache = make_tower(budget=1)
    want(tower, cache, 0, 8)
    assert [s.end_layer for _ in range(5) for s in tower.advance()] == [1, 2, 3, 4, 5]
    assert not tower.busy


def test_a_running_call_ends_though_its_request_is_gone():
    tower, cache = make_tower(budget=1)
    want(tower, cache, 0, 4)
    tower.advance()
    cache.unpin(key(0), "r")
    assert cache.entry(key(0)) is not None
    cache.check_integrity({TOWER})
    while tower.busy:
        tower.advance()
    entry = cache.entry(key(0))
    assert entry is not None
    assert entry.ready
    cache.check_integrity(set())


def test_a_frame_of_exactly_the_largest_capacity_runs_in_one_call():
    tower, cache = make_tower(budget=10_000)
    want(tower, cache, 0, 8)
    (only,) = tower.advance()
    assert only.call.packed.capacity == only.call.packed.num_patches == 64


@pytest.mark.parametrize("config", [CONFIG, TEXT_ONLY])
def test_layouts_bring_every_field_across(config):
    layouts = [layout.text_layout(config, 16), layout.sample_layout(config, 16)]
    if config.modalities:
        layouts.append(layout.encode_layout(GEOMETRY, 16))
    rng = np.random.default_rng(0)
    for each in layouts:
        packed, views = each.new()
        fills = {name: view.copy() for name, view in views.items()}
        for field in each.fields:
            assert (fills[field.name] == np.asarray(field.fill, field.dtype)).all()
            views[field.name][...] = rng.integers(0, 2**20, field.shape) / (
                3 if field.dtype == "float32" else 1
            )
        assert packed.shape == (each.size,)
        for name, value in each.unpack(jnp.asarray(packed)).items():
            assert value.dtype == views[name].dtype
            np.testing.assert_array_equal(value, views[name])


def test_untouched_fields_of_a_batch_are_padding():
    _, views = layout.text_layout(CONFIG, 16).new()
    slots = CONFIG.max_num_seqs
    for name in ("slot_T", "slot_B", "delta_slot_A", "reset_slot_B", "bias_slot_Z"):
        assert (views[name] == slots).all()  # out of range: dropped
    assert (views["pool_row_T"] == -1).all()
    assert (views["kv_lens_B"] == 0).all()


def test_page_deltas_of_the_worst_batch_fit():
    # Every sequence opens a page and the tokens fill whole pages.
    config = CONFIG
    for t in config.token_capacities:
        worst = max(
            sum(-(-n // config.page_size) + 1 for n in ([1] * (rows - 1) + [t - rows + 1]))
            for rows in range(1, config.rows_of(t) + 1)
        )
        assert worst - config.rows_of(t) <= layout.page_delta_capacity(config, t)
