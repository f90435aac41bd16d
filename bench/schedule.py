"""The TPU compiler's own schedule of Pallas kernels: regions, cycles, slots, visits.

A kernel is compiled for a TPU that is not there (`profile`), and what the compiler wrote about it
is read: the schedule with the empty bundles in which the core waits for a result or a unit, so
that one bundle is one cycle (`*packed-bundles-post-ra*`), the slots that each bundle fills
(`*pre-delay*utilization*`), and the shorter instruction stream that is stored
(`*final_bundles*`), in which the hardware itself waits.

Regions are loops and branches. `jax.named_scope` inside a kernel names the region that it opens
in, at no cost in the real program: the names come from a second compile that keeps them. How often
a named region runs is counted elsewhere (`bench.visits`), by running the kernel in interpret mode.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import tpu_compiler
from tpu_vl.kernels.chips import CHIPS, Chip

SLOTS = ("mxu", "xlu", "valu", "vpop", "eup", "load", "fill", "store", "spill", "salu")
PIPELINE_STEPS = 2  # iterations of the grid's loop that only copy: the first one in, the last out
COPY_TRIPS = 8  # assumed; in a trip the compiler moves up to 64 registers
_DELAY_SLOTS = {"v5e": 4, "v5p": 4, "v6e": 4, "tpu7x": 6}  # bundles that a branch still runs
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: [> ]*\{(.*)", re.DOTALL)
_BRANCH = re.compile(r"= sbr\.rel (?:\((!?%p\w+)\) )?target bundleno = (\d+)")
_SCOPE = re.compile(r"TraceMeStart\((\w+)\)")
_CUSTOM_CALL = re.compile(r"exit bundle: %\S+ = custom-call\(")
_COUNTERS = ("slots", "slot_bundles")
SCOPES_FLAG = "--xla_enable_custom_call_region_trace=true"


@dataclass(kw_only=True)
class Region:
    """A loop body, a branch, or the whole kernel; what lies in its own regions is not in it.

    Args:
        kind: "kernel", "loop" or "branch".
        start: first bundle, in the schedule of cycles.
        end: one past the last.
        depth: 0 for the kernel.
        parent: index of the region around it; None for the kernel.
        trips: iterations per visit of the parent, where the compiler knows them.
        labels: named scopes that open in it, in order, one per opening.
        cycles: bundles, the empty ones included.
        slots: how many times each of SLOTS is filled; a product fills "mxu" for every cycle in
            which it keeps a matrix unit busy.
        slot_bundles: in how many bundles it is filled at least once.
        dma_starts: copies that it starts.
    """

    kind: str
    start: int
    end: int
    depth: int = 0
    parent: int | None = None
    trips: int | None = None
    labels: tuple[str, ...] = ()
    cycles: int = 0
    slots: Counter[str] = field(default_factory=Counter)
    slot_bundles: Counter[str] = field(default_factory=Counter)
    dma_starts: int = 0


@dataclass(frozen=True, kw_only=True)
class KernelProfile:
    """One Pallas kernel of a program.

    Args:
        name: of the pallas_call.
        chip: that it was compiled for.
        regions: the kernel first, then its loops and branches in the order of the program.
        capacity: how many of each slot a bundle has.
        stored_bundles: of the instruction stream, without the cycles that the hardware waits.
    """

    name: str
    chip: Chip
    regions: tuple[Region, ...]
    capacity: dict[str, int]
    stored_bundles: int

    def share(self, region: Region, slot: str) -> float:
        """How full a slot is in a region's own cycles, 0 to 1."""
        if not region.cycles:
            return 0.0
        return region.slots[slot] / (self.capacity[slot] * region.cycles)

    def visits(self, counts: Mapping[str, int], grid_steps: int | None = None) -> list[float]:
        """How often each region runs.

        A region with a named scope runs as often as that scope was counted to open; another loop
        as often as its parent times its static trips; another branch as often as its parent, which
        is an upper bound. Copies inside VMEM whose length is data become loops that nothing names:
        COPY_TRIPS each.

        Args:
            counts: openings of each named scope over the whole kernel, counted in interpret mode.
            grid_steps: of the call that is asked about, where the kernel was compiled for a
                smaller grid; the outermost loop runs PIPELINE_STEPS more often.

        Raises:
            ValueError: a scope opens in several regions, was not counted, or a loop whose trips
                are data has none; the message says what to name.
        """
        where: dict[str, list[int]] = {}
        for index, region in enumerate(self.regions):
            for label in dict.fromkeys(region.labels):
                where.setdefault(label, []).append(index)
        found: list[float] = []
        for index, region in enumerate(self.regions):
            label = next((x for x in region.labels if region.parent is not None), None)
            if label is not None:
                if len(where[label]) > 1:
                    raise ValueError(
                        f"{self.name}: scope {label!r} opens in {len(where[label])} regions of the "
                        "schedule; give each copy of that code a name of its own"
                    )
                if label not in counts:
                    raise ValueError(f"{self.name}: scope {label!r} is in no count: {dict(counts)}")
                found.append(counts[label] / region.labels.count(label))
            elif region.parent is None:
                found.append(1.0)
            elif grid_steps is not None and region.kind == "loop" and region.depth == 1:
                found.append(float(grid_steps + PIPELINE_STEPS))
            elif region.kind == "loop" and region.trips is None and self._is_copy(index):
                found.append(found[region.parent] * COPY_TRIPS)
            elif region.kind == "loop" and region.trips is None:
                raise ValueError(
                    f"{self.name}: the loop at bundle {region.start} has as many trips as the data "
                    "says and no named scope: open one in its body"
                )
            else:
                found.append(found[region.parent] * (region.trips or 1))
        return found

    def _is_copy(self, index: int) -> bool:
        """Whether a loop is one that the compiler makes itself: nothing in it but moves."""
        inside = [r for r in self.regions[index:] if r.start < self.regions[index].end]
        arithmetic = sum(r.slots["valu"] + r.slots["mxu"] + r.dma_starts for r in inside)
        return len(inside) == 1 and arithmetic == 0

    def cycles(self, counts: Mapping[str, int], grid_steps: int | None = None) -> float:
        """Cycles of one call: the sum over regions of cycles times visits (see `visits`)."""
        visits = self.visits(counts, grid_steps)
        return sum(r.cycles * n for r, n in zip(self.regions, visits, strict=True))

    def slot_share(
        self, counts: Mapping[str, int], slot: str, grid_steps: int | None = None
    ) -> float:
        """How full a slot is over one call, 0 to 1."""
        visits = self.visits(counts, grid_steps)
        used = sum(r.slots[slot] * n for r, n in zip(self.regions, visits, strict=True))
        return used / (self.capacity[slot] * self.cycles(counts, grid_steps))

    def num_dma_starts(self, counts: Mapping[str, int], grid_steps: int | None = None) -> float:
        """Copies that one call starts itself; those of the grid's own pipeline are among them."""
        visits = self.visits(counts, grid_steps)
        return sum(r.dma_starts * n for r, n in zip(self.regions, visits, strict=True))

    def table(self) -> str:
        """The regions as text, one a line."""
        head = f"{self.name} on {self.chip.name}: {sum(r.cycles for r in self.regions)} cycles"
        lines = [
            f"{head} ({self.stored_bundles} stored bundles)",
            f"{'region':34}{'trips':>7}{'cycles':>8}" + "".join(f"{s:>7}" for s in (*SLOTS, "dma")),
        ]
        for region in self.regions:
            name = "  " * region.depth + f"{region.kind} @{region.start} {' '.join(region.labels)}"
            trips = "" if region.kind != "loop" else str(region.trips or "data")
            shares = "".join(f"{self.share(region, slot):7.0%}" for slot in SLOTS)
            lines.append(f"{name:34}{trips:>7}{region.cycles:8}{shares}{region.dma_starts:7}")
        return "\n".join(lines)


def profile(source: str, topology: str, *args: str, timeout_s: float = 600) -> list[KernelProfile]:
    """Compiles a program for an absent TPU and reads the schedule of every Pallas kernel in it.

    Args:
        source: Python that lowers and compiles for the topology, for example by
            `tpu_compiler.device`.
        topology: a slice, for example "v6e:1x1".
        args: sys.argv[1:] of the program.
        timeout_s: for each of the two compiles.

    Returns:
        The kernels in the order in which they were compiled.

    Raises:
        RuntimeError: the program failed; the message is what it wrote.
    """
    with TemporaryDirectory() as plain, TemporaryDirectory() as named:
        for folder, flags in ((plain, ""), (named, SCOPES_FLAG)):
            flags = f"{dump_flags(Path(folder))} {flags}"
            tpu_compiler.run(source, *args, flags=flags, timeout_s=timeout_s)
        chip = CHIPS[topology.partition(":")[0]]
        return [
            with_labels(read_kernel(dump, chip), read_kernel(names, chip))
            for dump, names in zip(
                find_kernels(Path(plain)), find_kernels(Path(named)), strict=True
            )
        ]


def dump_flags(folder: Path) -> str:
    """LIBTPU_INIT_ARGS with which the compiler writes the schedules that are read here."""
    passes = "packed-bundles-post-ra|final_bundles|per-bundle-utilization"
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=({passes})"
    )


@dataclass(frozen=True)
class Dump:
    """What the compiler wrote about one kernel: the text of each file."""

    name: str
    schedule: str
    utilization: str
    stored: str


def find_kernels(folder: Path) -> list[Dump]:
    """The Pallas kernels of a folder of dumps, in the order of their compilation."""
    found = []
    for path in sorted(folder.glob("*-packed-bundles-post-ra.txt")):
        if "schedule-analysis" in path.name or "DGO" in path.name:
            continue
        stem = re.sub(r"-\d+-packed-bundles-post-ra\.txt$", "", path.name)
        (utilization,) = folder.glob(f"{stem}-*-pre-delay_hlo-static-per-bundle-utilization.txt")
        (stored,) = (
            p.read_text()
            for p in folder.glob(f"{stem}-*-final_bundles.txt")
            if "analysis" not in p.name
        )
        if not _CUSTOM_CALL.search(stored):  # a fusion, or the program around the kernels
            continue
        name = stem.partition("-")[2]
        found.append(Dump(name, path.read_text(), utilization.read_text(), stored))
    return found


def bundles(text: str) -> list[str]:
    """The bundles of a schedule, each with all its lines, by number."""
    found: list[str] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            if int(match[1], 16) != len(found):
                raise ValueError(f"bundle {match[1]} follows {len(found)} bundles: {line[:100]!r}")
            found.append(match[2])
        elif found:
            found[-1] += "\n" + line
    return found


def read_utilization(text: str) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """Slots of a bundle, and how many of them each bundle fills."""
    rows = [
        tuple(int(x) for x in line.split())
        for line in text.splitlines()
        if re.fullmatch(r"[\d ]+", line) and line.strip()
    ]
    return dict(zip(SLOTS, rows[0], strict=True)), rows[1:]


def read_kernel(dump: Dump, chip: Chip) -> KernelProfile:
    """Reads one kernel's dump.

    Raises:
        ValueError: the files disagree, or regions overlap: this compiler writes another format.
    """
    schedule = bundles(dump.schedule)
    capacity, used = read_utilization(dump.utilization)
    if len(used) != len(schedule):
        raise ValueError(f"{dump.name}: {len(schedule)} bundles but slots of {len(used)}")
    regions = find_regions(schedule, _DELAY_SLOTS[chip.name])
    owner = _owners(regions, len(schedule))
    for text, row, region in zip(schedule, used, owner, strict=True):
        region.cycles += 1
        for slot, count in zip(SLOTS, row, strict=True):
            region.slots[slot] += count
            region.slot_bundles[slot] += count > 0
        region.dma_starts += len(re.findall(r"= dma\.\w+_to_\w+", text))
        region.labels += tuple(_SCOPE.findall(text))
    return KernelProfile(
        name=dump.name,
        chip=chip,
        regions=tuple(regions),
        capacity=capacity,
        stored_bundles=len(bundles(dump.stored)),
    )


def find_regions(schedule: list[str], delay_slots: int) -> list[Region]:
    """The loops and branches of a schedule: what its jumps go back over or skip."""
    size = len(schedule)
    found = [Region(kind="kernel", start=0, end=size)]
    for index, text in enumerate(schedule):
        for match in _BRANCH.finditer(text):
            target, after = int(match[2]), min(index + 1 + delay_slots, size)
            if target <= index:
                trips = _static_trips(schedule[target : index + 1], schedule, match[1] or "")
                found.append(Region(kind="loop", start=target, end=after, trips=trips))
            elif after < target:
                found.append(Region(kind="branch", start=after, end=min(target, size)))
    found.sort(key=lambda r: (r.start, -r.end, r.kind == "loop"))
    stack: list[int] = []
    for index, region in enumerate(found):
        while stack and found[stack[-1]].end <= region.start:
            stack.pop()
        if stack:
            region.parent = stack[-1]
            region.depth = len(stack)
            if region.end > found[stack[-1]].end:
                raise ValueError(
                    f"region [{region.start}, {region.end}) leaves the one around it, which ends "
                    f"at {found[stack[-1]].end}"
                )
        stack.append(index)
    return found


def _owners(regions: list[Region], size: int) -> list[Region]:
    owner = [regions[0]] * size
    for region in regions:
        owner[region.start : region.end] = [region] * (region.end - region.start)
    return owner


def _static_trips(body: list[str], schedule: list[str], predicate: str) -> int | None:
    """Trips of a loop that counts from a constant to a constant; None if it does not."""
    text = "\n".join(body)
    name = re.escape(predicate.lstrip("!"))
    test = re.search(rf"{name} = scmp\.ge\.s32\.totalorder (%s\w+), (\d+)", text)
    step = test and re.search(rf"{re.escape(test[1])} = sadd\.s32 (.*?)(?: /\*|  ;;| \}}|$)", text)
    if not test or not step:
        return None
    copies = {test[1], *re.findall(rf"(%s\w+) = smov {re.escape(test[1])}\b", text)}
    amounts = [int(x) for x in step[1].split(", ") if x.isdigit()]
    # The counter may have been spilled, so it is known by what it gets at the end of an iteration.
    starts = [
        start for start, back in re.findall(r"= sphi (%s\w+), (%s\w+)", text) if back in copies
    ]
    if len(amounts) != 1 or not amounts[0] or len(set(starts)) != 1:
        return None
    first = re.search(
        rf"{re.escape(starts[0])} = smov (?:\([^)]*\), )?(\d+)\b", "\n".join(schedule)
    )
    return math.ceil((int(test[2]) - int(first[1])) / amounts[0]) if first else None


def with_labels(kernel: KernelProfile, named: KernelProfile) -> KernelProfile:
    """The kernel with the labels of the same kernel compiled with its named scopes kept.

    Trips that only one of the two compiles shows as constants are taken from it.

    Raises:
        ValueError: the two have other regions; named scopes changed the program.
    """
    shape, other = ([(r.kind, r.depth) for r in k.regions] for k in (kernel, named))
    both = zip(kernel.regions, named.regions, strict=False)
    if shape != other or any(len({x.trips, y.trips} - {None}) > 1 for x, y in both):
        raise ValueError(
            f"{kernel.name}: {len(shape)} regions, but {len(other)} with named scopes kept:\n"
            f"{kernel.table()}\n{named.table()}"
        )
    for region, source in zip(kernel.regions, named.regions, strict=True):
        region.labels = source.labels
        region.trips = region.trips if region.trips is not None else source.trips
    return kernel


def to_json(kernel: KernelProfile) -> dict[str, Any]:
    """A profile as JSON values, for `from_json`."""
    regions = [
        vars(region) | {name: dict(getattr(region, name)) for name in _COUNTERS}
        for region in kernel.regions
    ]
    return vars(kernel) | {"chip": kernel.chip.name, "regions": regions}


def from_json(words: dict[str, Any]) -> KernelProfile:
    """The profile that `to_json` wrote."""
    regions = (
        Region(
            **region
            | {"labels": tuple(region["labels"])}
            | {name: Counter(region[name]) for name in _COUNTERS}
        )
        for region in words["regions"]
    )
    return KernelProfile(**words | {"chip": CHIPS[words["chip"]], "regions": tuple(regions)})


def main() -> None:
    """Prints the regions of every Pallas kernel that a script compiles."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("script", type=Path, help="Python that lowers and compiles")
    parser.add_argument("args", nargs="*", help="its arguments; the topology comes first")
    parser.add_argument("--target", choices=sorted(CHIPS), default="v6e")
    flags = parser.parse_args()
    topology = tpu_compiler.TOPOLOGIES[flags.target]
    for kernel in profile(flags.script.read_text(), topology, topology, *flags.args):
        print(kernel.table())


if __name__ == "__main__":
    main()
