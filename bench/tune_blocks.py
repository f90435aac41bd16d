"""Writes a table of block sizes from the model: `python -m bench.tune_blocks --op OP`.

For every real case it estimates some block sizes around the formula's (`bench.measure`); a case for
which the formula is more than GAIN off the best gets an entry in kernels/<op>/tuned.py. What is not
in the table takes the formula.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from bench import measure, own, programs
from bench.measure import Candidate
from tpu_vl.kernels.chips import CHIPS, Chip
from tpu_vl.kernels.paged_attention import blocks as paged_blocks
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.vision_attention import blocks as vision_blocks
from tpu_vl.kernels.vision_attention import cases as vision_cases

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
GAIN = 0.02  # a table entry is worth at least this much time
MAX_LINES = 200
CHIP_NAMES = ("v5e", "v6e", "tpu7x")


@dataclass(frozen=True)
class Choice:
    """Block sizes of one shape.

    Args:
        case: its name.
        key: the shape, as the table's key; cases may share it.
        blocks: a Blocks of the op.
        formula: what the formula gives.
        fields: of Blocks, those that the case decides.
        candidate: the case in those blocks.
    """

    case: str
    key: tuple[Any, ...]
    blocks: Any
    formula: Any
    fields: tuple[str, ...]
    candidate: Candidate


def vision_choices(name: str, chip: Chip) -> Iterator[Choice]:
    """Block sizes around the formula's that fit in VMEM."""
    case = measure.one_device(vision_cases.REAL[name])
    shape = (case.num_rows, case.num_heads, case.width, case.dtype)
    formula = vision_blocks.formula(*shape, chip)
    sizes = [n for n in (256, 512, 1024) if n <= formula.chunk]
    tried = {formula: None}
    for queries, keys, heads in itertools.product(sizes, sizes, (2, 4, 8)):
        blocks = replace(formula, queries=queries, keys=keys, heads=heads)
        fits = vision_blocks.vmem_bytes(blocks, case.num_rows, case.width, case.dtype)
        if case.num_heads % heads == 0 and fits <= vision_blocks.vmem_limit_bytes(chip):
            tried[blocks] = None
    for blocks in tried:
        candidate = measure.vision_candidate(case, blocks, chip)
        fields = tuple(asdict(blocks))
        yield Choice(name, (chip.name, *shape), blocks, formula, fields, candidate)


def paged_choices(name: str, chip: Chip) -> Iterator[Choice]:
    """Block sizes around the formula's; what does not fit in VMEM does not compile."""
    case = measure.one_device(paged_cases.REAL[name])
    shape = (case.num_heads, case.num_kv_heads, case.width, case.page_size, case.cache_dtype)
    by_formula = paged_blocks.formula(case.num_kv_heads, case.width, case.cache_dtype)
    formula = own.paged_blocks_of(case, chip, by_formula)
    tried = {formula: None}
    if max(case.q_lens) == 1:
        fields = ("decode_keys",)
        tried |= {replace(formula, decode_keys=keys): None for keys in (256, 512, 1024)}
    else:
        fields = ("prefill_keys", "prefill_rows")
        for keys, rows in itertools.product((256, 512, 1024), repeat=2):
            tried[replace(formula, prefill_keys=keys, prefill_rows=rows)] = None
    fitted = dict.fromkeys(own.paged_blocks_of(case, chip, blocks) for blocks in tried)
    for blocks in fitted:
        candidate = measure.paged_candidate(case, blocks, chip)
        yield Choice(name, (chip.name, *shape), blocks, formula, fields, candidate)


def best_blocks(choices: Sequence[Choice], chip: Chip) -> dict[tuple[Any, ...], Any]:
    """Per key the blocks that beat the formula's by GAIN in some case; each sets its own fields."""
    profiles = programs.profile_each([c.candidate.program for c in choices], chip.name)
    by_case: dict[str, list[tuple[float, Choice]]] = {}
    for choice, profile in zip(choices, profiles, strict=True):
        if not isinstance(profile, str):
            seconds = measure.estimate(choice.candidate, profile, chip).seconds
            by_case.setdefault(choice.case, []).append((seconds, choice))
    found: dict[tuple[Any, ...], Any] = {}
    for tried in by_case.values():
        best_s, best = min(tried, key=lambda item: item[0])
        formula_s = min((s for s, c in tried if c.blocks == c.formula), default=math.inf)
        if best_s < formula_s * (1 - GAIN):
            changes = {name: getattr(best.blocks, name) for name in best.fields}
            found[best.key] = replace(found.get(best.key, best.formula), **changes)
    return found


def module(op: str, table: dict[tuple[Any, ...], Any]) -> str:
    """The text of kernels/<op>/tuned.py.

    Raises:
        ValueError: more than MAX_LINES; raise GAIN.
    """
    lines = [
        f'"""Block sizes of {op}, written by bench/tune_blocks.py: shape to fields of Blocks."""',
        "",
        "TABLE: dict[tuple[str | int, ...], tuple[int, ...]] = {",
        *(f"    {json_tuple(key)}: {json_tuple(astuple(b))}," for key, b in sorted(table.items())),
        "}",
    ]
    if len(lines) > MAX_LINES:
        raise ValueError(f"{len(lines)} lines of table, at most {MAX_LINES}: raise GAIN")
    return "\n".join(lines) + "\n"


def json_tuple(values: Iterable[Any]) -> str:
    """A tuple of numbers and names as source."""
    return "(" + ", ".join(json.dumps(v) for v in values) + ")"


def main() -> None:
    """Writes one op's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=sorted(CHOICES), required=True)
    parser.add_argument("--target", choices=CHIP_NAMES, nargs="*", default=CHIP_NAMES)
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    flags = parser.parse_args()
    choices, names = CHOICES[flags.op]
    table: dict[tuple[Any, ...], Any] = {}
    for chip in (CHIPS[name] for name in flags.target):
        asked = [c for name in names if flags.case in name for c in choices(name, chip)]
        table |= best_blocks(asked, chip)
    (KERNELS / flags.op / "tuned.py").write_text(module(flags.op, table))


CHOICES: dict[str, tuple[Callable[[str, Chip], Iterator[Choice]], Iterable[str]]] = {
    "vision_attention": (vision_choices, vision_cases.REAL),
    "paged_attention": (paged_choices, paged_cases.REAL),
}

if __name__ == "__main__":
    main()
