"""The plan: what its JSON says, whether a model fits, and that each remedy is one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.precompile.named import CONFIGS, checkpoint_of, model_on
from tpu_vl import cli, launch, planning, remedies, sized
from tpu_vl.flags import ServeFlags, SizeFlags, option_name
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile import plan as plans
from tpu_vl.precompile.compile import Progress
from tpu_vl.precompile.footprint import RUNTIME_RESERVE_BYTES
from tpu_vl.precompile.fusions import Fusion
from tpu_vl.precompile.plan import Plan
from tpu_vl.precompile.program_sizes import ProgramSize, interpolated
from tpu_vl.precompile.targets import parse_target

ROOT = Path(__file__).resolve().parents[2]


def plan_on(name: str, target: str, **flags: Any) -> Plan:
    return planning.formula_plan(SizeFlags(**flags), checkpoint_of(name), parse_target(target))


def run_plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["plan", *arguments])
    return code, capsys.readouterr().out


def test_json_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(CONFIGS / "qwen3_vl_8b.json")
    arguments = ("--model", model, "-tp", "4", "--target", "v6e:2x2", "--fast", "--json")
    code, out = run_plan(*arguments, capsys=capsys)
    plan = json.loads(out)
    assert (code, plan["fits"]) == (0, True)
    hbm = plan["hbm_bytes"]
    assert set(hbm) == {"weights", "kv", "pool", "temporaries", "code", "free", "state"}
    assert sum(hbm.values()) == plan["device_bytes"] == CHIPS["v6e"].hbm_bytes
    assert all(size > 0 for size in hbm.values())
    assert set(plan["decode"]) == {"1", "16", "64", "256"}
    for step in [*plan["decode"].values(), plan["prefill"]["1024"]]:
        assert set(step) == {"estimate_us", "roofline_us"}
        assert step["estimate_us"] > step["roofline_us"] > 0
    assert plan["kv_tokens"] > 500_000
    assert plan["programs"] == len(plan["program_sizes"]) <= 40
    assert plan["video_patches_max"] == 49_152
    assert plan["compiled"] is False
    assert 0 < plan["padding_share"] <= 0.125
    assert plan["padding_share"] == plan["padding_shares"]["mixed"]


def test_table_says_the_same() -> None:
    plan = plan_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4)
    table = plan.table()
    for text in ("fits", f"{plan.kv_tokens} tokens", "decode, 64 x", "prefill, 1024", "tokens/s"):
        assert text in table
    # Of 31.25 GiB a tenth, and a quarter of a GiB.
    assert "must be at least 3.375: the runtime's 0.25 and what --hbm-utilization 0.9" in table


def test_the_listed_programs_are_those_that_are_compiled() -> None:
    model = model_on("qwen3_vl_2b", "v6e:2x2", tensor_parallel_size=2)
    plan = planning.plan_of(model, SizeFlags(), "v6e:2x2")
    assert list(plan.programs) == [p.name for p in sized.list_programs(model)]


def test_decode_of_more_sequences_than_slots_has_no_time() -> None:
    plan = plan_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4, max_num_seqs=64)
    assert plan.decode[256] is None
    assert plan.decode[64] is not None
    assert plan.to_json()["decode"]["256"] is None
    assert "no program holds so many" in plan.table()


def test_a_text_only_plan_has_no_media() -> None:
    whole = plan_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4)
    text = plan_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4, text_model_only=True)
    assert (text.footprint.pool, text.video_patches_max, text.tower) == (0, 0, {})
    assert text.footprint.weights < whole.footprint.weights
    assert text.kv_tokens > whole.kv_tokens
    assert len(text.programs) < len(whole.programs)


def test_videos_are_bound_by_request_processor_and_context() -> None:
    limits = {
        "request_patches": 262_144,
        "video_pixels": 25_165_824,
        "patch_pixels": 512,
        "merge_cells": 4,
        "max_model_len": 32_768,
        "overhead_tokens": 128,
    }
    assert plans.video_patches_max(**limits) == 49_152
    assert plans.video_patches_max(**limits | {"request_patches": 1_000}) == 1_000
    assert plans.video_patches_max(**limits | {"max_model_len": 1_128}) == 4_000
    assert plans.video_patches_max(**limits | {"max_model_len": 100}) == 0


@pytest.mark.parametrize(
    ("name", "target", "flags"),
    [
        ("qwen3_vl_32b", "v6e:2x2", {}),
        ("qwen3_vl_8b", "v6e:1x1", {"max_model_len": 262_144}),
        ("qwen3_vl_32b", "v5e:2x2", {"tensor_parallel_size": 4}),
        ("qwen3_vl_235b_a22b", "v6e:4x4", {"tensor_parallel_size": 16}),
    ],
)
def test_every_remedy_fits(name: str, target: str, flags: dict[str, Any]) -> None:
    checkpoint, asked = checkpoint_of(name), SizeFlags(**flags)
    assert not planning.formula_plan(asked, checkpoint, parse_target(target)).fits
    found = remedies.remedies(asked, checkpoint, parse_target(target))
    assert found
    for remedy in found:
        changed, on = apply(remedy, asked, target)
        assert planning.formula_plan(changed, checkpoint, parse_target(on)).fits, remedy


def apply(remedy: str, flags: SizeFlags, target: str) -> tuple[SizeFlags, str]:
    """The flags as an operator would type the remedy behind them."""
    names = {option_name(f.name): f.name for f in dataclasses.fields(flags)}
    words = remedy.split()
    changes: dict[str, Any] = {}
    while words:
        option = words.pop(0)
        if option == "--target":
            target = words.pop(0)
        elif words and not words[0].startswith("--"):
            changes[names[option]] = int(words.pop(0))
        else:
            changes[names[option]] = True
    return dataclasses.replace(flags, **changes), target


def test_a_remedy_is_no_larger_than_needed() -> None:
    found = remedies.remedies(SizeFlags(), checkpoint_of("qwen3_vl_32b"), parse_target("v6e:2x2"))
    assert found == ["--tensor-parallel-size 4"], "2 devices are too few, 3 do not divide the heads"


def test_nothing_helps_a_model_that_no_slice_holds() -> None:
    config = dict(checkpoint_of("qwen3_vl_235b_a22b").config)
    config["text_config"] = {**config["text_config"], "num_hidden_layers": 94_000}
    checkpoint = dataclasses.replace(checkpoint_of("qwen3_vl_235b_a22b"), config=config)
    found = remedies.remedies(SizeFlags(), checkpoint, parse_target("v5e:1x1"))
    assert found == []
    assert "no flag" in remedies.remedies_text(found)


def test_models_without_code_are_planned_by_formula() -> None:
    plan = plan_on("qwen3_vl_235b_a22b", "v6e:4x4", tensor_parallel_size=16)
    assert planning.NO_CODE in plan.notes
    assert plan.footprint.weights == pytest.approx(2 * 235.67e9 / 16, rel=0.05)
    assert not plan.fits, "470 GB of weights leave too little of 16 x 31.25 GiB"
    assert any("int8" in note and "would fit" in note for note in plan.notes)
    hybrid = plan_on("qwen3_5_397b_a17b", "tpu7x:2x2x1", tensor_parallel_size=8)
    assert not hybrid.fits
    assert any("float8" in note and "would fit" in note for note in hybrid.notes)
    state = 256 * 45 * 64 * 128 * 128 * 4 / 8
    assert hybrid.footprint.state > state, "recurrent state of 256 slots"


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.json")))
def test_every_published_checkpoint_has_a_plan(name: str) -> None:
    plan = plan_on(name, "v5p:2x2x1", tensor_parallel_size=4)
    assert plan.footprint.weights > 0
    assert plan.decode[1] is not None
    assert json.dumps(plan.to_json())
    assert plan.table()


def test_fits_means_inside_the_share_with_one_longest_request() -> None:
    plan = plan_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4)
    assert plan.fits
    spare = int(plan.chip.hbm_bytes * 0.9) - RUNTIME_RESERVE_BYTES - plan.footprint.total
    grown = dataclasses.replace(plan.footprint, code=plan.footprint.code + spare + 1)
    assert not dataclasses.replace(plan, footprint=grown).fits
    assert not dataclasses.replace(plan, kv_tokens=plan.max_model_len - 1).fits


def test_measured_programs_replace_the_formula() -> None:
    plan = plan_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4)
    measured = {
        "a": ProgramSize(temporaries=5, code=7, compile_s=1.0),
        "b": ProgramSize(temporaries=3, code=9, compile_s=2.0),
    }
    found = plan.footprint.with_programs(measured)
    assert (found.temporaries, found.code) == (5, 16)
    analysis = SimpleNamespace(
        temp_size_in_bytes=100, output_size_in_bytes=60, alias_size_in_bytes=50
    )
    program: Any = SimpleNamespace(arguments=("state",))
    assert planning.temporary_bytes(program, analysis) == 110
    first: Any = SimpleNamespace(arguments=())
    assert planning.temporary_bytes(first, analysis) == 100, "its results are the state"


def test_a_compiled_plan_reports_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, flags = checkpoint_of("qwen3_vl_2b"), SizeFlags(tensor_parallel_size=4)
    target = parse_target("v6e:2x2")

    def compiled(name: str) -> Any:
        analysis = SimpleNamespace(
            temp_size_in_bytes=1_000 if name == "text/64" else 10,
            output_size_in_bytes=7,
            alias_size_in_bytes=5,
            generated_code_size_in_bytes=100,
        )
        return SimpleNamespace(memory_analysis=lambda: analysis, as_text=lambda: name)

    def compile_all(listed: Any, store: Any, progress: Any, expected_s: Any) -> Any:
        assert store is None
        assert {p.name for p in listed} == set(expected_s)
        for done, program in enumerate(listed, 1):
            progress(Progress(program.name, done, len(listed), 2.0, True, 0.0))
        return {program.name: compiled(program.name) for program in listed}

    fusion = Fusion(
        name="f",
        scope="mlp",
        cycles=130,
        num_bytes=1.0,
        flops=0,
        roofline_cycles=100.0,
        share=0.5,
        is_small=False,
    )
    monkeypatch.setattr(planning, "describe_devices", planning.name_devices)
    monkeypatch.setattr(planning, "compile_all", compile_all)
    monkeypatch.setattr(
        planning, "flagged_fusions", lambda text, _: [fusion] if text == "text/64" else []
    )
    formula = planning.formula_plan(flags, checkpoint, target)
    made = planning.compiled_plan(formula, flags, checkpoint, target)
    count = len(formula.programs)
    assert made.is_compiled
    assert made.footprint.temporaries == 1_002
    assert made.footprint.code == 100 * count
    assert made.compile_s == 2 * count
    assert made.flagged_fusions == (f"text/64: {planning.flagged_line(fusion)}",)
    assert made.to_json()["formula_bytes"]["code"] == formula.footprint.code
    assert (made.footprint.weights, made.kv_tokens) == (
        formula.footprint.weights,
        formula.kv_tokens,
    )
    assert "the compiler's analysis" in made.table()
    sketched = planning.formula_plan(flags, checkpoint_of("qwen2_vl_2b"), target)
    assert planning.compiled_plan(sketched, flags, checkpoint_of("qwen2_vl_2b"), target) is sketched


def test_a_flagged_fusion_says_how_slow_and_how_much_it_is() -> None:
    fusion = Fusion(
        name="f",
        scope="layer_0/mlp",
        cycles=200,
        num_bytes=1.0,
        flops=0,
        roofline_cycles=100.0,
        share=0.035,
        is_small=False,
        count=36,
    )
    line = planning.flagged_line(fusion)
    assert line == (
        "36 x layer_0/mlp: 2.00 times the roofline, 3.5% of the program's cycles: no reason known"
    )


def test_tables_are_straight_between_measurements() -> None:
    table = {4: 1.0, 64: 3.0, 1024: 7.0}
    assert [interpolated(table, n) for n in (1, 4, 16, 64, 256, 1024)] == pytest.approx(
        [1, 1, 2, 3, 5, 7]
    )
    assert interpolated(table, 4096) == pytest.approx(9)


def test_serve_ends_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = parse_target("v6e:2x2")

    @dataclasses.dataclass(frozen=True)
    class Device(planning.NamedDevice):
        @property
        def client(self) -> Any:
            return SimpleNamespace(devices=lambda: planning.name_devices(target))

    def on_tpus(*_: Any) -> Any:
        devices = [Device(d.platform, d.device_kind, d.id) for d in planning.name_devices(target)]
        return make_mesh(1, devices)

    monkeypatch.setattr(launch, "make_mesh", on_tpus)
    monkeypatch.setattr(launch, "open_checkpoint", lambda *_, **__: checkpoint_of("qwen3_vl_32b"))
    with pytest.raises(remedies.DoesNotFitError) as raised:
        cli.serve(ServeFlags())
    assert "DOES NOT FIT" in raised.value.message
    assert "--tensor-parallel-size 4" in raised.value.message
    fitting = model_on("qwen3_vl_2b", "v6e:2x2")
    assert remedies.check_fit(fitting, SizeFlags(), target) is not None


def test_elsewhere_nothing_is_planned() -> None:
    made = launch.make_plan(ServeFlags())
    assert remedies.check_fit(made, ServeFlags()) is None


def test_slices_are_found_by_their_devices() -> None:
    assert str(remedies.slice_of("TPU v6 lite", 4)).startswith("v6e:2x2,")
    assert remedies.slice_of("TPU v6 lite", 8).num_hosts == 1
    assert remedies.slice_of("TPU7x", 8).topology == "2x2x1"


FAST = """
import sys
from tpu_vl import cli
assert cli.main(["plan", "--model", "tests/configs/qwen3_vl_8b.json", "-tp", "4",
                 "--target", "v6e:2x2", "--fast"]) == 0
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
heavy = {"torch", "transformers", "tensorflow", "fastapi", "av"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_fast_plan_neither_imports_torch_nor_looks_for_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAST],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
