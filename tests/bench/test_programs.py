"""What was compiled once is not compiled again."""

from pathlib import Path
from typing import Any

import jax
import pytest

from bench import programs, schedule
from bench.programs import Program
from bench.schedule import KernelProfile, Region
from tpu_vl.kernels.chips import CHIPS


class Lowered:
    """Stands for a lowered program and counts its compilations."""

    def __init__(self, text: str) -> None:
        self.text, self.num_compiled = text, 0

    def as_text(self) -> str:
        return self.text

    def compile(self) -> "Lowered":
        self.num_compiled += 1
        if "too large" in self.text:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem\nmore")
        return self


def found(lowered: Any, folder: Path, mode: str = programs.COMPILE, chip: str = "v6e") -> Any:
    return programs._stored(lowered, chip, mode, folder)


def test_the_store_holds_what_a_program_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    good, bad = Lowered("a program"), Lowered("too large")
    monkeypatch.delenv(programs.STORE, raising=False)
    for _ in range(2):
        assert found(good, folder) == {"failure": ""}
    assert good.num_compiled == 2, "without a folder nothing is kept"
    monkeypatch.setenv(programs.STORE, str(tmp_path / "store"))
    for _ in range(2):
        assert found(good, folder) == {"failure": ""}
        assert found(bad, folder)["failure"] == "JaxRuntimeError: RESOURCE_EXHAUSTED: vmem"
    assert (good.num_compiled, bad.num_compiled) == (3, 1)
    found(good, folder, chip="v5e")
    found(Lowered("another program"), folder)
    assert good.num_compiled == 4


def test_equal_programs_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []

    def compiled(batch: list[Program], chip: str, mode: str) -> list[dict[str, Any]]:
        del chip, mode
        batches.append([p.sizes["n"] for p in batch])
        return [{"failure": str(p.sizes["n"])} for p in batch]

    monkeypatch.setattr(programs, "_compile", compiled)
    asked = [Program("x.y", {"n": n % 20}) for n in range(40)]
    assert programs.failures(asked, "v6e") == [str(n % 20) for n in range(40)]
    assert [len(batch) for batch in batches] == [programs.BATCH, 20 - programs.BATCH]


def test_where_scopes_change_the_program_its_own_schedule_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {
        "same": {programs.CYCLES: ("kernel", "branch"), programs.NAMES: ("kernel", "branch")},
        "merged": {programs.CYCLES: ("kernel",), programs.NAMES: ("kernel", "branch")},
    }
    cycles_of = {programs.CYCLES: 100, programs.NAMES: 103}

    def compiled(batch: list[Program], chip: str, mode: str) -> list[dict[str, Any]]:
        def kernel(build: str) -> schedule.KernelProfile:
            kept = enumerate(kinds[build][mode])
            regions = tuple(Region(kind=kind, start=0, end=9, depth=n) for n, kind in kept)
            regions[0].cycles = cycles_of[mode]
            return KernelProfile(
                name=build,
                chip=CHIPS[chip],
                regions=regions,
                capacity=dict.fromkeys(schedule.SLOTS, 1),
                stored_bundles=9,
            )

        return [
            {"failure": "", "kernel": schedule.to_json(kernel(p.build)), "around_cycles": 0}
            for p in batch
        ]

    monkeypatch.setattr(programs, "_compile", compiled)
    asked = [Program(build, {}) for build in kinds]
    for quick, expected in ((False, [(100, False), (103, True)]), (True, [(103, True)] * 2)):
        said = []
        for found in programs.profile_each(asked, "v6e", quick=quick):
            assert not isinstance(found, str)
            said.append((found.kernel.regions[0].cycles, found.scopes_kept))
        assert said == expected
