"""The model that turns schedules into times, the marks and the committed snapshots."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import kernels, marks, measure, own
from bench.measure import Candidate
from bench.programs import Profile, Program
from bench.schedule import KernelProfile, Region
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.paged_attention.blocks import Blocks
from tpu_vl.kernels.paged_attention.cases import Case as PagedCase
from tpu_vl.kernels.vision_attention import cases as vision_cases

V6E = CHIPS["v6e"]
CASE = PagedCase(
    num_tokens=64,
    num_seqs=4,
    num_heads=32,
    num_kv_heads=8,
    width=128,
    page_size=16,
    max_pages=32,
    q_lens=(1, 1, 20),
    past_lens=(15, 16, 100),
    dtype="bfloat16",
    cache_dtype="bfloat16",
    tp=4,
)


BLOCKS = Blocks(decode_keys=512, prefill_keys=1024, prefill_rows=512, num_bufs=4)


def profile(cycles: int) -> Profile:
    """A kernel of one named loop of that many cycles."""
    loop = Region(kind="loop", start=0, end=cycles, depth=1, parent=0, labels=("block",))
    loop.cycles = cycles
    loop.slots["mxu"] = loop.slots["valu"] = cycles
    kernel = KernelProfile(
        name="made_up",
        chip=V6E,
        regions=(Region(kind="kernel", start=0, end=cycles), loop),
        capacity={"mxu": 2, "valu": 4, "spill": 2},
        stored_bundles=cycles,
    )
    return Profile(kernel, around_cycles=7, scopes_kept=False)


def candidate(**changes: int) -> Candidate:
    return replace(
        Candidate(
            name="made_up", program=Program("x.y", {}), counts={"block": 1000}, hbm_bytes=1638
        ),
        **changes,
    )


def test_time_is_the_larger_of_compute_and_copies() -> None:
    found = measure.estimate(candidate(), profile(175), V6E)
    assert found.cycles == 175_000
    assert found.compute_s == pytest.approx(1e-4)
    assert found.memory_s == pytest.approx(1e-9)
    assert found.seconds == found.compute_s
    assert (found.mxu_share, found.valu_share, found.around_cycles) == (0.5, 0.25, 7)
    found = measure.estimate(candidate(hbm_bytes=1_638_000_000), profile(175), V6E)
    assert found.seconds == found.memory_s == pytest.approx(1e-3)


def test_many_small_copies_cost_latency() -> None:
    few = candidate(num_copies=4000, copies_in_flight=4)
    found = measure.estimate(few, profile(175), V6E)
    assert found.memory_s == pytest.approx(1000 * measure.DMA_LATENCY_S)
    assert found.seconds == pytest.approx(1001 * measure.DMA_LATENCY_S)


def test_phases_follow_each_other_and_hide_nothing() -> None:
    bound_by_copies = candidate(hbm_bytes=1_638_000_000)
    found = measure.estimate(replace(candidate(), after=bound_by_copies), profile(175), V6E)
    assert found.cycles == 2 * 175_000
    assert found.seconds == pytest.approx(1e-4 + 1e-3)
    assert found.mxu_share == pytest.approx(0.5)


def test_a_mixed_batch_decodes_and_then_prefills() -> None:
    case = measure.one_device(CASE)
    found = measure.paged_candidate(case, BLOCKS)
    assert found.after is not None
    assert (found.counts["write_token"], found.counts["write_tile"]) == (2, 0)
    assert (found.after.counts["write_token"], found.after.counts["write_tile"]) == (0, 1)
    assert found.num_copies + found.after.num_copies == own.fetched_pages(case, BLOCKS)
    assert found.program == found.after.program


def test_rivals_are_tried_in_blocks_that_compile_in_minutes() -> None:
    local = measure.one_device(CASE)  # 8 heads: as they are
    assert measure.ragged_blocks(local) == list(measure.RAGGED_PREFILL_BLOCKS)
    heads_64 = replace(local, num_heads=64)
    assert measure.ragged_blocks(heads_64) == [(512, 64), (256, 128), (128, 256)]
    assert measure.ragged_blocks(replace(heads_64, width=256))[0] == (256, 64)
    decoding = replace(heads_64, q_lens=(1, 1), past_lens=(5, 5))
    assert measure.ragged_blocks(decoding) == list(measure.RAGGED_DECODE_BLOCKS)


def test_rivals_read_the_pages_of_the_case() -> None:
    def page_bytes(cache_dtype: str) -> list[float]:
        case = replace(CASE, cache_dtype=cache_dtype)
        subject = measure.paged_subject("some", case, V6E)
        assert {r.program.sizes["cache_dtype"] for r in subject.rivals} == {cache_dtype}
        local = measure.one_device(case)
        queries_bytes = 2 * local.num_tokens * local.num_heads * 128 * 2
        return [(r.hbm_bytes - queries_bytes) / r.num_copies for r in subject.rivals]

    assert set(page_bytes("bfloat16")) == {CASE.page_size * 2 * 2 * 128 * 2}
    assert set(page_bytes("int8")) == {CASE.page_size * 2 * 2 * 128}


def test_one_device_has_its_share_of_the_heads_or_all() -> None:
    local = measure.one_device(CASE)
    assert (local.num_heads, local.num_kv_heads, local.tp) == (8, 2, 1)
    local = measure.one_device(replace(CASE, tp=16))
    assert (local.num_heads, local.num_kv_heads, local.tp) == (32, 8, 1)


def test_pages_that_are_fetched_end_at_the_causal_limit() -> None:
    case = measure.one_device(CASE)
    # Two decoding sequences of 16 and 17 tokens; 20 tokens at 120 in tiles of 16 (group 4).
    fetched = own.fetched_pages(case, replace(BLOCKS, prefill_rows=64))
    assert fetched == 1 + 2 + -(-116 // 16) + -(-120 // 16)


def test_rows_of_new_tokens_go_through_hbm_once_more() -> None:
    case = measure.one_device(CASE)
    # 22 new tokens: 8 rows of queries, 8 of results, K and V of 2 heads; written and read.
    rows_bytes = 2 * 22 * (8 + 8 + 4) * 128 * 2
    assert own.row_bytes(case) == rows_bytes
    whole = measure.paged_candidate(case, BLOCKS)
    assert whole.after is not None
    moved = whole.hbm_bytes + whole.after.hbm_bytes
    fetched = own.fetched_pages(case, BLOCKS) * own.page_bytes(case)
    assert moved == fetched + own.query_bytes(case) + rows_bytes


def test_addresses_cover_the_case() -> None:
    table_BM, starts_B, lens_B = own.addresses(measure.one_device(CASE))
    assert starts_B.tolist() == [0, 1, 2, 22, 22]
    assert lens_B.tolist() == [16, 17, 120, 0]
    assert table_BM[0, 0] == 0
    assert table_BM[1, :2].tolist() == [1, 2]
    assert table_BM[2, :8].tolist() == list(range(3, 11))


def test_a_mark_is_missed_above_its_limit() -> None:
    assert marks.Mark("x", 1.25, 1.25).holds
    missed = marks.Mark("x", 1.2501, 1.25)
    assert not missed.holds
    assert "MISSED" in marks.table([missed])


def test_the_marks_have_their_cases() -> None:
    assert len(set(marks.case_names())) == len(marks.case_names())
    assert len(marks.DECODE) >= 3
    assert len(marks.PREFILL) >= 1


def row(name: str, cycles: int) -> kernels.Row:
    """A measured case of made-up cycles and no rivals."""
    subject = measure.Subject(
        op="vision_attention",
        case=name,
        ours=candidate(),
        rivals=(),
        floor=(),
        flops=1e9,
        kv_bytes=0,
        least_bytes=1000,
    )
    return kernels.Row(subject, measure.estimate(candidate(), profile(cycles), V6E), (), None, {})


def test_a_snapshot_keeps_other_cases_of_the_same_versions(tmp_path: Path) -> None:
    path = tmp_path / "v6e.json"
    kernels.save([row("a", 100), row("b", 200)], V6E, path)
    kernels.save([row("b", 300)], V6E, path)
    saved = json.loads(path.read_text())
    assert {r["case"]: r["cycles"] for r in saved["rows"]} == {"a": 100_000, "b": 300_000}
    path.write_text(json.dumps(saved | {"libtpu": "0.0"}))
    kernels.save([row("b", 300)], V6E, path)
    assert [r["case"] for r in json.loads(path.read_text())["rows"]] == ["b"]


def test_rows_have_the_keys_and_the_ratio_to_the_roofline() -> None:
    words = row("a", 175).as_json(V6E)
    assert set(kernels.KEYS) <= set(words)
    assert words["roofline_ratio"] == pytest.approx(1e-4 / (1e9 / V6E.bf16_flops))
    assert "a" in kernels.table([row("a", 175)], V6E)


@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
def test_a_snapshot_is_complete(target: str) -> None:
    saved = json.loads((kernels.RESULTS / f"{target}.json").read_text())
    assert saved["target"] == target
    for package in ("jax", "jaxlib", "libtpu"):
        assert re.fullmatch(r"\d+(\.\w+)+", saved[package]), package
    for found in saved["rows"]:
        assert set(kernels.KEYS) <= set(found), found["case"]
        assert found["target"] == target
        assert found["cycles"] > 0
        assert found["seconds"] > 0
        assert found["roofline_ratio"] >= 0.99, found["case"]
        assert 0 < found["mxu_share"] <= 1
    names = [found["case"] for found in saved["rows"]]
    assert sorted(names) == sorted([*vision_cases.REAL, *paged_cases.REAL])
