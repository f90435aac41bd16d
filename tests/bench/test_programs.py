"""What was compiled once is not compiled again."""

from pathlib import Path
from typing import Any

import jax
import pytest

from bench import programs
from bench.programs import Program


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
