"""The marks that the kernels are held to on v6e, and whether they hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_vl.kernels.chips import CHIPS
from tpu_vl.kernels.paged_attention import cases as paged_cases
from tpu_vl.kernels.paged_attention.cases import Case as PagedCase
from tpu_vl.kernels.vision_attention import cases as vision_cases
from tpu_vl.kernels.vision_attention.cases import Case as VisionCase

if TYPE_CHECKING:
    from bench.kernels import Row

CHIP = CHIPS["v6e"]


@dataclass(frozen=True)
class Mark:
    """A limit and what was measured.

    Args:
        what: the case and the ratio.
        value: measured.
        limit: `value` is at most it.
    """

    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the value keeps the limit."""
        return self.value <= self.limit


def tower(num_heads: int, width: int, num_rows: int, segments: tuple[int, ...]) -> str:
    """The name of the bfloat16 tower case of those sizes."""

    def fits(case: VisionCase) -> bool:
        sizes = (case.num_heads, case.width, case.num_rows, case.segments, case.tp, case.dtype)
        return sizes == (num_heads, width, num_rows, segments, 1, "bfloat16")

    return next(name for name, case in vision_cases.REAL.items() if fits(case))


def paged_8b_tp4(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> list[str]:
    """The names of the bfloat16 cases of Qwen3-VL-8B on 4 devices, by page size."""

    def fits(case: PagedCase) -> bool:
        heads = (case.num_heads, case.num_kv_heads, case.width, case.tp, case.cache_dtype)
        lens = tuple(p + q for p, q in zip(case.past_lens, case.q_lens, strict=True))
        return (*heads, case.q_lens, lens) == (32, 8, 128, 4, "bfloat16", q_lens, kv_lens)

    found = [name for name, case in paged_cases.REAL.items() if fits(case)]
    return sorted(found, key=lambda name: paged_cases.REAL[name].page_size)


FULL = tower(16, 72, 4096, (4096,))
PACKED = tower(16, 72, 16384, (1024,) * 16)
LARGE = tower(16, 72, 16384, (16384,))
WINDOWS = tower(16, 80, 4096, (64,) * 64)
FULL_80 = tower(16, 80, 4096, (4096,))
DECODE = paged_8b_tp4((1,) * 64, (4096,) * 64)
PREFILL = paged_8b_tp4((1024,), (8192,))


def case_names() -> list[str]:
    """The cases that the marks speak of."""
    return [FULL, PACKED, LARGE, WINDOWS, FULL_80, *DECODE, *PREFILL]


def evaluate(rows: Mapping[str, "Row"]) -> list[Mark]:
    """Every mark from the measured cases on v6e.

    Args:
        rows: by case name; FULL with its floor.
    """
    cycles = {name: row.ours.cycles for name, row in rows.items()}
    full = rows[FULL]
    splash = min((e for e in full.rivals if e.name.startswith("splash")), key=lambda e: e.cycles)
    assert full.floor is not None
    found = [
        Mark(
            f"{FULL}: cycles over those of the two matmuls alone ({full.floor.name})",
            cycles[FULL] / full.floor.cycles,
            1.25,
        ),
        Mark(f"{FULL}: cycles over {splash.name}", cycles[FULL] / splash.cycles, 0.75),
        Mark(f"{PACKED}: cycles over {LARGE}", cycles[PACKED] / cycles[LARGE], 0.07),
        Mark(f"{WINDOWS}: cycles over {FULL_80}", cycles[WINDOWS] / cycles[FULL_80], 0.10),
    ]
    for name in DECODE:
        row = rows[name]
        bandwidth_s = row.subject.kv_bytes / CHIP.hbm_bytes_per_s
        found += [
            Mark(f"{name}: compute over copies", row.ours.compute_s / row.ours.memory_s, 1.0),
            Mark(f"{name}: time over KV bytes / bandwidth", row.ours.seconds / bandwidth_s, 1.1),
        ]
    for name in PREFILL:
        row = rows[name]
        assert row.rival is not None
        found.append(
            Mark(f"{name}: time over {row.rival.name}", row.ours.seconds / row.rival.seconds, 0.75)
        )
    return found


def table(marks: Sequence[Mark]) -> str:
    """The marks as text."""
    lines = [f"{'value':>7}{'limit':>7}  mark"]
    for mark in marks:
        word = "holds " if mark.holds else "MISSED"
        lines.append(f"{mark.value:7.3f}{mark.limit:7.2f}  {word}  {mark.what}")
    return "\n".join(lines)
