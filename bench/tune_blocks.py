"""Writes a table of block sizes from the model: `python -m bench.tune_blocks --op OP`.

A shape begins with the formula's block sizes and goes on, round by round, to those beside the best
so far: half and twice of each size. One compile each serves the search; the best few are compiled
once more, without named scopes, for their exact times. A program has one shape and many batches, so
sizes are judged by the times of all cases of the shape, each of which counts alike; of about equal
ones those are taken whose slowest case loses least. What is not at least GAIN better than the
formula is not in the table. Shapes that are not asked for keep theirs.
"""

import argparse
import json
import math
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import measure, own, programs, tower_visits
from bench.measure import Candidate
from bench.programs import Program
from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.chips import CHIPS, Chip
from tpu_vl.kernels.paged_attention import blocks as paged_blocks
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.paged_attention.cases import Case as PagedCase
from tpu_vl.kernels.vision_attention import blocks as vision_blocks
from tpu_vl.kernels.vision_attention import cases as vision_cases
from tpu_vl.kernels.vision_attention.cases import Case as VisionCase

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
GAIN = 0.02  # a table entry is worth at least this much time
EQUAL = 0.01  # gains that differ by less are alike
ROUNDS = 2
FINALISTS = 4  # timed exactly: the search's times are too long, by up to 4 %, not all alike
MAX_LINES = 200
CHIP_NAMES = ("v5e", "v6e", "tpu7x")
# int8 for TPU v5 and v6, e4m3fn for 7x: what each multiplies.
FOREIGN_CACHE = {"v5e": "float8_e4m3fn", "v6e": "float8_e4m3fn", "tpu7x": "int8"}
Key = tuple[str | int, ...]


@dataclass(kw_only=True)
class Part:
    """Fields of Blocks that decide the times of some cases.

    Args:
        fields: their names.
        cases: of one device.
        seconds: by the values of the fields, the times of the cases; none: it does not compile.
    """

    fields: tuple[str, ...]
    cases: list[Any]
    seconds: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def values(self, blocks: Any) -> tuple[int, ...]:
        """The fields' values."""
        return tuple(getattr(blocks, name) for name in self.fields)

    def gain(self, values: tuple[int, ...], formula: tuple[int, ...]) -> float:
        """How much less time the cases take than by the formula, by the geometric mean over them;
        none if one does not compile."""
        ratios = self.ratios(values, formula)
        return 1 - math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0

    def ratios(self, values: tuple[int, ...], formula: tuple[int, ...]) -> list[float]:
        """The times of the cases over those by the formula; empty if one does not compile."""
        seconds, formula_s = self.seconds[values], self.seconds[formula]
        if len(seconds) != len(formula_s):
            return []
        return [s / f for s, f in zip(seconds, formula_s, strict=True)]

    def best(self, formula: tuple[int, ...]) -> tuple[int, ...]:
        """The values with the largest gain."""
        return max(self.seconds, key=lambda values: (self.gain(values, formula), values == formula))

    def choice(self, formula: tuple[int, ...]) -> tuple[int, ...] | None:
        """What a table gets: of values that gain about as much as the best, those whose slowest
        case loses least; None where the formula is as good."""
        least = max(GAIN, self.gain(self.best(formula), formula) - EQUAL)
        found = [values for values in self.seconds if self.gain(values, formula) >= least]
        return min(found, key=lambda values: max(self.ratios(values, formula)), default=None)


@dataclass(kw_only=True)
class Shape:
    """A key of the table.

    Args:
        key: as `pick_blocks` looks it up.
        formula: what it takes else.
        parts: what is tuned on its own.
        names: of the cases.
    """

    key: Key
    formula: Any
    parts: list[Part]
    names: list[str] = field(default_factory=list)

    def is_of(self, words: Sequence[str]) -> bool:
        """Whether the name of a case holds one of the words."""
        return any(word in name for word in words for name in self.names)

    def best(self) -> Any:
        """The best blocks so far."""
        changes: dict[str, int] = {}
        for part in self.parts:
            found = part.best(part.values(self.formula)) if part.seconds else None
            changes |= zip(part.fields, found or part.values(self.formula), strict=True)
        return replace(self.formula, **changes)

    def entry(self) -> Any | None:
        """The blocks that the table gets; None where the formula is as good."""
        changes: dict[str, int] = {}
        for part in self.parts:
            if part.seconds and (found := part.choice(part.values(self.formula))):
                changes |= zip(part.fields, found, strict=True)
        return replace(self.formula, **changes) if changes else None


def neighbours(blocks: Any, names: Iterable[str]) -> Iterator[Any]:
    """Blocks of which one field is twice or half as large."""
    for name in names:
        value = getattr(blocks, name)
        yield replace(blocks, **{name: 2 * value})
        if value % 2 == 0:
            yield replace(blocks, **{name: value // 2})


class Tower:
    """Tuning of vision_attention."""

    def shapes(self, chip: Chip) -> list[Shape]:
        """The shapes of the real cases."""
        found: dict[Key, Shape] = {}
        for name, case in one_device(vision_cases.REAL):
            sizes = (case.num_rows, case.num_heads, case.width, case.dtype)
            key = (chip.name, *sizes)
            if key not in found:
                part = Part(fields=("queries", "keys", "tile", "heads", "chunk"), cases=[])
                formula = vision_blocks.formula(*sizes, chip)
                found[key] = Shape(key=key, formula=formula, parts=[part])
            found[key].names.append(name)
            found[key].parts[0].cases.append(case)
        return list(found.values())

    def untried(self, shape: Shape, chip: Chip) -> list[Any]:
        """Blocks to try next."""
        (part,) = shape.parts
        case = part.cases[0]
        found = {shape.formula: None} if not part.seconds else {}
        for blocks in neighbours(shape.best(), ("queries", "keys", "tile", "heads")):
            longest = max(blocks.queries, blocks.keys)
            whole = replace(
                blocks,
                tile=min(blocks.tile, blocks.queries, blocks.keys),
                chunk=round_up(case.num_rows, longest),
            )
            if self.fits(whole, case):
                found[vision_blocks.fit(whole, case.num_rows, case.width, case.dtype, chip)] = None
        return [blocks for blocks in found if part.values(blocks) not in part.seconds]

    def fits(self, blocks: vision_blocks.Blocks, case: VisionCase) -> bool:
        """Whether the sizes divide each other, and the case's, and a step takes so many heads."""
        large, small = sorted((blocks.queries, blocks.keys), reverse=True)
        return (
            large % small == 0
            and small % blocks.tile == 0
            and blocks.tile % 128 == 0
            and case.num_heads % blocks.heads == 0
            and blocks.heads <= vision_blocks.most_heads(case.dtype)
            and large < 2 * max(case.num_rows, 128)
        )

    def candidate(self, case: VisionCase, blocks: vision_blocks.Blocks) -> Candidate:
        """A case in some blocks; one program serves all cases with steps like these."""
        return replace(
            measure.vision_candidate(case, blocks, tower_visits.counts(case, blocks)),
            program=own.vision_step(case, blocks),
        )


class Paged:
    """Tuning of paged_attention: decode blocks by decode batches, prefill blocks by the others.

    Neither decides the schedule of the other: a part is tried beside the formula's sizes of the
    other, decoding beside the least ones, which compile faster.
    """

    def shapes(self, chip: Chip) -> list[Shape]:
        """The shapes of the real cases."""
        found: dict[Key, Shape] = {}
        for name, case in one_device(paged_cases.REAL):
            if case.cache_dtype == FOREIGN_CACHE[chip.name]:
                continue
            heads = (case.num_heads, case.num_kv_heads, case.width)
            key = (chip.name, *heads, case.page_size, case.cache_dtype)
            if key not in found:
                parts = [
                    Part(fields=("decode_keys",), cases=[]),
                    Part(fields=("prefill_keys", "prefill_rows"), cases=[]),
                ]
                formula = paged_blocks.formula(*heads, case.cache_dtype, chip)
                found[key] = Shape(key=key, formula=self.fitted(case, formula, chip), parts=parts)
            found[key].names.append(name)
            found[key].parts[max(case.q_lens) > 1].cases.append(case)
        return list(found.values())

    def untried(self, shape: Shape, chip: Chip) -> list[Any]:
        """Blocks to try next: the formula's but for one part's sizes."""
        case = next(case for part in shape.parts for case in part.cases)
        found = [] if any(p.seconds for p in shape.parts) else [shape.formula]
        for part in shape.parts:
            best = dict(zip(part.fields, part.values(shape.best()), strict=True))
            if part.cases:
                for blocks in neighbours(replace(shape.formula, **best), part.fields):
                    found.append(self.fitted(case, blocks, chip))
        return [
            blocks
            for blocks in dict.fromkeys(found)
            if any(p.cases and p.values(blocks) not in p.seconds for p in shape.parts)
        ]

    def fitted(
        self, case: PagedCase, blocks: paged_blocks.Blocks, chip: Chip
    ) -> paged_blocks.Blocks:
        """What the kernel makes of blocks on that chip where there are many tokens."""
        return own.paged_blocks_of(replace(case, num_tokens=TOKENS), chip, blocks)

    def candidate(self, case: PagedCase, blocks: paged_blocks.Blocks) -> Candidate:
        """A case in some blocks."""
        return replace(measure.paged_candidate(case, blocks), program=self.program(case, blocks))

    def program(self, case: PagedCase, blocks: paged_blocks.Blocks) -> Program:
        """What is compiled for a case: one for all batches, and for groups that pad to the same."""
        num_heads = own.query_group(case) * case.num_kv_heads
        same = replace(case, num_tokens=TOKENS, num_heads=num_heads, q_lens=(1,), past_lens=(0,))
        if case.decodes:
            rows = paged_blocks.LEAST_ROWS
            blocks = replace(blocks, prefill_keys=NUM_LANES, prefill_rows=rows)
        return own.paged_program(same, blocks)


TOKENS = 1024  # of a program for all batches: a schedule does not depend on them


def one_device(cases: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The cases with what one device has of them."""
    return ((name, measure.one_device(case)) for name, case in cases.items())


def climb(op: Tower | Paged, shapes: Sequence[Shape], chip: Chip) -> None:
    """Fills `seconds` of every part, round by round."""
    for number in range(ROUNDS):
        asked = [(shape, blocks) for shape in shapes for blocks in op.untried(shape, chip)]
        print(f"{chip.name}, round {number}: {len(asked)} block sizes", file=sys.stderr)
        fill(op, asked, chip, quick=True)


def settle(op: Tower | Paged, shapes: Sequence[Shape], chip: Chip) -> None:
    """Leaves each part the formula's values and the best few, with the times of exact schedules."""
    asked = [(shape, blocks) for shape in shapes for blocks in finalists(shape)]
    print(f"{chip.name}, exact: {len(asked)} block sizes", file=sys.stderr)
    for shape in shapes:
        for part in shape.parts:
            part.seconds.clear()
    fill(op, asked, chip, quick=False)


def finalists(shape: Shape) -> list[Any]:
    """The formula's blocks, and those with the best few values of each part."""
    found = [shape.formula]
    for part in shape.parts:
        formula = part.values(shape.formula)
        compiled = [values for values, seconds in part.seconds.items() if seconds]
        by_gain = sorted(compiled, key=lambda values: -part.gain(values, formula))
        for values in by_gain[:FINALISTS]:
            found.append(replace(shape.formula, **dict(zip(part.fields, values, strict=True))))
    return list(dict.fromkeys(found))


def fill(op: Tower | Paged, asked: Sequence[tuple[Shape, Any]], chip: Chip, *, quick: bool) -> None:
    """Times blocks for every part of their shape that lacks them; equal programs compile once."""
    tasks: list[tuple[list[float], Candidate]] = []
    for shape, blocks in asked:
        for part in shape.parts:
            if part.values(blocks) not in part.seconds:
                times = part.seconds[part.values(blocks)] = []
                tasks += [(times, op.candidate(case, blocks)) for case in part.cases]
    profiles = programs.profile_each([c.program for _, c in tasks], chip.name, quick=quick)
    for (times, candidate), profile in zip(tasks, profiles, strict=True):
        if not isinstance(profile, str):
            times.append(measure.estimate(candidate, profile, chip).seconds)


def merged(
    table: Mapping[Key, tuple[int, ...]], shapes: Iterable[Shape]
) -> dict[Key, tuple[int, ...]]:
    """A table with the tuned shapes' entries in place of those that it had; others stay."""
    found = dict(table)
    for shape in shapes:
        found.pop(shape.key, None)
        if (entry := shape.entry()) is not None:
            found[shape.key] = astuple(entry)
    return found


def module(op: str, table: Mapping[Key, tuple[int, ...]]) -> str:
    """The text of kernels/<op>/tuned.py.

    Raises:
        ValueError: more than MAX_LINES; raise GAIN.
    """
    lines = [
        f'"""Block sizes of {op}, written by bench/tune_blocks.py: shape to fields of Blocks."""',
        "",
        "TABLE: dict[tuple[str | int, ...], tuple[int, ...]] = {",
        *(f"    {json_tuple(key)}: {json_tuple(b)}," for key, b in sorted(table.items())),
        "}",
    ]
    if len(lines) > MAX_LINES:
        raise ValueError(f"{len(lines)} lines of table, at most {MAX_LINES}: raise GAIN")
    return "\n".join(lines) + "\n"


def json_tuple(values: Iterable[Any]) -> str:
    """A tuple of numbers and names as source."""
    return "(" + ", ".join(json.dumps(v) for v in values) + ")"


def report(shape: Shape) -> Iterator[str]:
    """The tried sizes of a shape as text, the best ones first."""
    for part in shape.parts:
        formula = part.values(shape.formula)
        gains = {values: part.gain(values, formula) for values in part.seconds}
        words = [f"{v} {g:+.1%}" for v, g in sorted(gains.items(), key=lambda x: -x[1])]
        yield f"{shape.key} {part.fields} by formula {formula}: {', '.join(words)}"


def main() -> None:
    """Writes one op's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=sorted(OPS), required=True)
    parser.add_argument("--target", choices=CHIP_NAMES, nargs="*", default=CHIP_NAMES)
    parser.add_argument(
        "--case",
        nargs="*",
        default=[""],
        help="only shapes of a case whose name holds one of these",
    )
    flags = parser.parse_args()
    path = KERNELS / flags.op / "tuned.py"
    table: dict[Key, tuple[int, ...]] = runpy.run_path(str(path))["TABLE"]
    for chip in (CHIPS[name] for name in flags.target):
        op = OPS[flags.op]()
        shapes = [shape for shape in op.shapes(chip) if shape.is_of(flags.case)]
        for step in (climb, settle):
            step(op, shapes, chip)
            for shape in shapes:
                print("\n".join(report(shape)), flush=True)
        table = merged(table, shapes)
        path.write_text(module(flags.op, table))


OPS: dict[str, Callable[[], Tower | Paged]] = {"vision_attention": Tower, "paged_attention": Paged}

if __name__ == "__main__":
    main()
