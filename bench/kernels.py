"""What the TPU compiler's schedule says of the kernels: `python -m bench.kernels --target v6e`.

For every case of kernels/*/cases.py: cycles of our kernel, the time that they and its copies take,
the ratio to the roofline, and the same work through the kernels that jax ships, each with the best
block sizes of a small sweep. `--marks` checks the marks of docs/kernels.md instead.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import marks, measure, programs
from bench.measure import Candidate, Estimate, Subject
from bench.programs import Profile
from tpu_vl.kernels.chips import CHIPS, Chip
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.vision_attention import cases as vision_cases

RESULTS = Path(__file__).resolve().parent / "results"
KEYS = (
    "op",
    "case",
    "target",
    "cycles",
    "seconds",
    "roofline_ratio",
    "mxu_share",
    "best_rival",
    "ratio_to_rival",
)


@dataclass(frozen=True)
class Row:
    """A measured case.

    Args:
        subject: the case.
        ours: our kernel.
        rivals: jax's, in all block sizes that compile.
        floor: the fastest that only does the matmuls; None where it was not asked for.
        failures: candidates that do not compile, with the compiler's words.
    """

    subject: Subject
    ours: Estimate
    rivals: tuple[Estimate, ...]
    floor: Estimate | None
    failures: dict[str, str]

    @property
    def rival(self) -> Estimate | None:
        """The fastest of jax's; None where none of them takes the case."""
        return measure.best(self.rivals)

    def as_json(self, chip: Chip) -> dict[str, Any]:
        """KEYS, and what stands behind them."""
        return {
            "op": self.subject.op,
            "case": self.subject.case,
            "target": chip.name,
            "cycles": round(self.ours.cycles),
            "seconds": self.ours.seconds,
            "roofline_ratio": self.ours.seconds / self.subject.roofline_s(chip),
            "mxu_share": self.ours.mxu_share,
            "best_rival": self.rival.name if self.rival else None,
            "ratio_to_rival": self.ours.seconds / self.rival.seconds if self.rival else None,
            "compute_s": self.ours.compute_s,
            "memory_s": self.ours.memory_s,
            "valu_share": self.ours.valu_share,
            "spill_share": self.ours.spill_share,
            "around_cycles": self.ours.around_cycles,
            "scopes_kept": self.ours.scopes_kept,
            "rival": asdict(self.rival) if self.rival else None,
            "floor": asdict(self.floor) if self.floor else None,
            "failures": self.failures,
        }


def subjects(
    chip: Chip, wanted: Callable[[str], bool], floor: Callable[[str], bool]
) -> list[Subject]:
    """The cases whose name is wanted; those that `floor` names with the matmuls alone."""
    found = [
        measure.vision_subject(name, case, chip, floor=floor(name))
        for name, case in vision_cases.REAL.items()
        if wanted(name)
    ]
    return found + [
        measure.paged_subject(name, case, chip)
        for name, case in paged_cases.REAL.items()
        if wanted(name)
    ]


def rows(asked: Sequence[Subject], chip: Chip, *, quick: bool = False) -> list[Row]:
    """Compiles every candidate and estimates it.

    Args:
        asked: cases.
        chip: that they run on.
        quick: for our kernels, as in `programs.profile_each`. Scopes add a third to the cycles of
            ragged paged attention, so that rivals are always compiled without.
    """
    others = [c.program for s in asked for c in (*s.rivals, *s.floor)]
    mine = iter(programs.profile_each([s.ours.program for s in asked], chip.name, quick=quick))
    profiles = iter(programs.profile_each(others, chip.name))

    def estimates(
        group: Sequence[Candidate], said: Iterator[Profile | str], failures: dict[str, str]
    ) -> list[Estimate]:
        found = []
        for candidate in group:
            profile = next(said)
            if isinstance(profile, str):
                failures[candidate.name] = profile
            else:
                found.append(measure.estimate(candidate, profile, chip))
        return found

    found = []
    for subject in asked:
        failures: dict[str, str] = {}
        ours = estimates([subject.ours], mine, failures)
        if not ours:
            raise RuntimeError(f"{subject.case} does not compile: {failures}")
        shipped = tuple(estimates(subject.rivals, profiles, failures))
        floor = measure.best(estimates(subject.floor, profiles, failures))
        found.append(Row(subject, ours[0], shipped, floor, failures))
    return found


def table(found: Sequence[Row], chip: Chip) -> str:
    """The rows as text."""
    lines = [
        f"{'case':44}{'cycles':>10}{'time us':>9}{'roofline':>9}{'MXU':>6}{'vector':>8}"
        f"{'bound':>9}{'of rival':>10}  rival"
    ]
    for row in found:
        words = row.as_json(chip)
        ours = row.ours
        bound = "memory" if ours.memory_s > ours.compute_s else "compute"
        ratio = words["ratio_to_rival"]
        lines.append(
            f"{row.subject.case:44}{ours.cycles:10.0f}{ours.seconds * 1e6:9.1f}"
            f"{words['roofline_ratio']:9.2f}{ours.mxu_share:6.0%}{ours.valu_share:8.0%}"
            f"{bound:>9}{'-' if ratio is None else f'{ratio:.2f}':>10}  {words['best_rival'] or ''}"
        )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """The packages that the figures depend on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def save(found: Sequence[Row], chip: Chip, path: Path) -> None:
    """Writes rows to a snapshot; its other rows stay if they are of the same versions."""
    head = versions() | {"target": chip.name}
    kept: dict[str, Any] = {}
    if path.exists():
        old = json.loads(path.read_text())
        if {name: old.get(name) for name in head} == head:
            kept = {row["case"]: row for row in old["rows"]}
    kept |= {row.subject.case: row.as_json(chip) for row in found}
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(kept[name]) for name in sorted(kept))
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def main() -> int:
    """Prints the table, the JSON or the marks; exit code 1 where a mark is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(CHIPS), default="v6e")
    parser.add_argument(
        "--case", nargs="*", default=[""], help="only cases whose name holds one of these"
    )
    parser.add_argument("--json", action="store_true", help="a list of objects, not a table")
    parser.add_argument("--save", action="store_true", help="also write bench/results/TARGET.json")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="our kernels in one compile instead of two: half the time, up to 4 %% more cycles",
    )
    parser.add_argument("--marks", action="store_true", help="the marks, all of v6e, instead")
    flags = parser.parse_args()
    chip = marks.CHIP if flags.marks else CHIPS[flags.target]
    if flags.marks:
        names = marks.case_names()
        asked = subjects(chip, lambda n: n in names, lambda n: n == marks.FULL)
        beside = (marks.FULL, *marks.PREFILL)
        found = rows([s if s.case in beside else replace(s, rivals=()) for s in asked], chip)
        results = marks.evaluate({row.subject.case: row for row in found})
        print(marks.table(results))
        return 0 if all(r.holds for r in results) else 1
    asked = subjects(chip, lambda n: any(x in n for x in flags.case), lambda _: False)
    found = rows(asked, chip, quick=flags.quick)
    if flags.save:
        save(found, chip, RESULTS / f"{chip.name}.json")
    if flags.json:
        print(json.dumps([row.as_json(chip) for row in found], indent=1))
    else:
        print(table(found, chip))
    return 0


if __name__ == "__main__":
    sys.exit(main())
