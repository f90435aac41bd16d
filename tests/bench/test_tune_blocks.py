"""How block sizes are judged, where tuning looks for them, and the tables that it writes."""

from dataclasses import asdict, astuple, replace
from types import SimpleNamespace

import pytest

from bench import measure, own, programs, tower_visits, tune_blocks
from bench.programs import Profile, Program
from bench.tune_blocks import Paged, Part, Shape, Tower
from tests.tpu_compile import have_libtpu
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.paged_attention.blocks import Blocks
from tpu_vl.kernels.vision_attention import blocks as vision_blocks
from tpu_vl.kernels.vision_attention import cases as vision_cases

V6E = CHIPS["v6e"]
BLOCKS = Blocks(decode_keys=512, prefill_keys=1024, prefill_rows=512, num_bufs=4)
KEY_TP4 = (8, 2, 128, 64, "bfloat16")  # the 8B's on four devices


def shape(decode_s: dict, prefill_s: dict) -> Shape:
    """A shape whose sizes take those times."""
    parts = [
        Part(fields=("decode_keys",), cases=["a"], seconds=decode_s),
        Part(fields=("prefill_keys", "prefill_rows"), cases=["b", "c"], seconds=prefill_s),
    ]
    return Shape(key=("v6e", 8), formula=BLOCKS, parts=parts)


def asked(op: Tower | Paged, word: str) -> list[Shape]:
    """The shapes that have a case of such a name."""
    return [found for found in op.shapes(V6E) if found.is_of([word])]


def test_an_entry_has_the_best_sizes_of_each_part() -> None:
    found = shape({(512,): [1.0], (1024,): [0.9]}, {(1024, 512): [1.0, 4.0]}).entry()
    assert found == replace(BLOCKS, decode_keys=1024)


def test_sizes_are_judged_by_all_cases_which_count_alike() -> None:
    gains = shape({}, {(1024, 512): [40.0, 1.0], (1024, 1024): [38.0, 1.2], (512, 512): [36, 1.05]})
    assert gains.entry() == replace(BLOCKS, prefill_keys=512)
    assert shape({}, {(1024, 512): [40.0, 1.0], (1024, 1024): [38.0, 1.2]}).entry() is None


def test_of_equal_gains_the_least_loss_is_taken() -> None:
    near = {(512, 512): [0.7, 1.16], (256, 512): [0.78, 1.045], (256, 256): [0.9, 1.0]}
    assert shape({}, {(1024, 512): [1.0, 1.0]} | near).entry() == replace(BLOCKS, prefill_keys=256)


def test_a_small_gain_is_left_to_the_formula() -> None:
    found = shape({(512,): [1.0], (1024,): [1 - tune_blocks.GAIN / 2]}, {})
    assert found.entry() is None
    assert found.best() == replace(BLOCKS, decode_keys=1024), "but the search goes on from it"


def test_sizes_that_do_not_compile_are_not_taken() -> None:
    assert shape({(512,): [1.0], (1024,): []}, {}).entry() is None


def test_a_table_keeps_the_entries_of_shapes_that_were_not_tuned() -> None:
    old = {("v6e", 8): (1,), ("v5e", 8): (2,)}
    better = shape({(512,): [1.0], (1024,): [0.5]}, {})
    want = {("v5e", 8): (2,), ("v6e", 8): astuple(replace(BLOCKS, decode_keys=1024))}
    assert tune_blocks.merged(old, [better]) == want
    assert tune_blocks.merged(old, [shape({(512,): [1.0]}, {})]) == {("v5e", 8): (2,)}


def test_a_call_of_few_steps_is_compiled_as_it_is() -> None:
    case = measure.one_device(vision_cases.REAL["qwen3_vl_8b_tower_1024_tp1"])
    blocks = vision_blocks.Blocks(queries=1024, keys=1024, tile=256, heads=16, chunk=1024)
    sizes = own.vision_step(case, blocks).sizes
    assert (sizes["num_rows"], sizes["num_heads"], sizes["blocks"]) == (1024, 16, asdict(blocks))
    quarter = replace(blocks, heads=4)
    sizes = own.vision_step(case, quarter).sizes
    assert (sizes["num_rows"], sizes["num_heads"]) == (2048, 8)


@pytest.mark.parametrize("op", [Tower(), Paged()])
def test_the_search_goes_round_the_best_sizes_once(op: Tower | Paged) -> None:
    (found,) = asked(op, "qwen3_vl_8b_tower_4096_tp1" if isinstance(op, Tower) else "page16_tp4")
    first = op.untried(found, V6E)
    assert first[0] == found.formula
    assert len(first) > 2
    for blocks in first:
        for part in found.parts:
            if part.cases:
                part.seconds[part.values(blocks)] = [1.0] * len(part.cases)
    assert op.untried(found, V6E) == []


def test_the_best_few_are_settled_by_exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    by_search = {512: [1.0], 1024: [0.5], 2048: [0.51], 4096: [0.52], 128: [], 256: [0.53], 64: [2]}
    found = shape({(keys,): seconds for keys, seconds in by_search.items()}, {})
    exact_s = {512: 1.0, 1024: 0.9, 2048: 0.8, 4096: 0.85, 256: 0.7}

    def profile_each(wanted: list[int], chip: str, *, quick: bool) -> list[float]:
        assert (chip, quick) == ("v6e", False)
        return [exact_s[keys] for keys in wanted]

    monkeypatch.setattr(tune_blocks.programs, "profile_each", profile_each)
    monkeypatch.setattr(
        tune_blocks.measure, "estimate", lambda _, s, __: SimpleNamespace(seconds=s)
    )
    op = SimpleNamespace(candidate=lambda _, blocks: SimpleNamespace(program=blocks.decode_keys))
    tune_blocks.settle(op, [found], V6E)  # type: ignore[arg-type]
    decoding = found.parts[0]
    assert decoding.seconds == {(keys,): [s] for keys, s in exact_s.items()}
    assert found.entry() == replace(BLOCKS, decode_keys=256)


def test_a_part_is_tried_beside_the_same_sizes_of_the_other() -> None:
    (found,) = (s for s in Paged().shapes(V6E) if s.key[1:] == KEY_TP4)
    decoding, prefill = found.parts
    formula = found.formula
    for blocks in Paged().untried(found, V6E):
        kept = [part.values(blocks) == part.values(formula) for part in found.parts]
        assert any(kept), blocks
    sizes = (formula, replace(formula, prefill_keys=2 * formula.prefill_keys))
    for part, different in ((decoding, 1), (prefill, 2)):
        programs_of = [Paged().program(part.cases[0], blocks) for blocks in sizes]
        assert len({str(program) for program in programs_of}) == different


def test_decoding_is_judged_by_contexts_that_do_not_fill_their_blocks() -> None:
    """Full blocks alone would speak for the largest."""
    for found in asked(Paged(), "decode_"):
        shares = [
            sum((past + 1) % 256 > 0 for past in case.past_lens) / len(case.past_lens)
            for case in found.parts[0].cases
        ]
        assert max(shares) > 0.5, found.key


def test_cases_of_a_shape_are_tuned_together() -> None:
    keys = [s.key for s in Tower().shapes(V6E)]
    assert len(set(keys)) == len(keys)
    (found,) = asked(Tower(), "edge_windows_4096_tp1")
    assert len(found.parts[0].cases) == len(found.names) == 3


def test_a_step_is_tried_with_no_more_heads_than_compile_in_seconds() -> None:
    def tried(dtype: str) -> set[int]:
        (found,) = asked(Tower(), f"qwen3_vl_8b_tower_1024{dtype}_tp1")
        return {blocks.heads for blocks in Tower().untried(found, V6E)}

    assert tried("_float32") == {4, 8}
    assert tried("") == {8, 16}


def test_tables_of_blocks_are_python_and_short() -> None:
    table = {("v6e", 8, 2, 128, 64, "bfloat16"): astuple(BLOCKS)}
    space: dict = {}
    exec(tune_blocks.module("paged_attention", table), space)
    ((key, fields),) = space["TABLE"].items()
    assert key == ("v6e", 8, 2, 128, 64, "bfloat16")
    assert Blocks(**dict(zip(asdict(BLOCKS), fields, strict=True))) == BLOCKS
    many = {("v6e", n): astuple(BLOCKS) for n in range(tune_blocks.MAX_LINES)}
    with pytest.raises(ValueError, match="raise GAIN"):
        tune_blocks.module("paged_attention", many)


def profiles(*asked: Program) -> tuple[list[Profile], list[dict[tuple[str, ...], int]]]:
    """On v6e, and the cycles of what has a name."""
    found = programs.profile_each(asked, "v6e", quick=True)
    good = [profile for profile in found if isinstance(profile, Profile)]
    assert len(good) == len(asked), found
    regions = [profile.kernel.regions for profile in good]
    return good, [{r.labels: r.cycles for r in each if r.labels} for each in regions]


@pytest.mark.slow
@pytest.mark.skipif(not have_libtpu(), reason="libtpu, the TPU compiler, is not installed")
def test_one_program_stands_for_all_cases_with_such_steps() -> None:
    """The blocks of a kernel take as long in the small program as in the whole call."""
    case = measure.one_device(vision_cases.REAL["qwen3_vl_8b_tower_4096_tp4"])
    sizes = (case.num_rows, case.num_heads, case.width, case.dtype)
    blocks = vision_blocks.formula(*sizes, V6E)
    asked = own.vision_program(case, blocks), own.vision_step(case, blocks)
    (whole, small), (cycles, others) = profiles(*asked)
    assert cycles.keys() == others.keys()
    for labels in (("full_block",), ("border_block",), ("narrow_tiles",)):
        assert others[labels] == cycles[labels], labels
    counts, steps = tower_visits.counts(case, blocks), own.vision_steps(case, blocks)
    found = small.kernel.cycles(counts, steps)
    assert found == pytest.approx(whole.kernel.cycles(counts), rel=tune_blocks.GAIN / 2)


@pytest.mark.slow
@pytest.mark.skipif(not have_libtpu(), reason="libtpu, the TPU compiler, is not installed")
def test_one_program_stands_for_all_batches_that_decode() -> None:
    """Blocks of decoding take as long beside the smallest prefill blocks."""
    case = measure.one_device(paged_cases.REAL["qwen3_vl_8b_decode_4096_tp4"])
    blocks = own.paged_blocks_of(case, V6E)
    asked = own.paged_program(case, blocks), Paged().program(case, blocks)
    (whole, small), (cycles, others) = profiles(*asked)
    for name in (("decode_block",), ("decode_full",)):
        assert others[name] == cycles[name], name
    counts = own.paged_counts(case, blocks)
    found = small.kernel.cycles(counts)
    assert found == pytest.approx(whole.kernel.cycles(counts), rel=tune_blocks.GAIN / 2)
