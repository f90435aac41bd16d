"""Which fusions of a compiled TPU program are slower than their own bytes and FLOPs.

The compiler writes its estimate of every fusion's cycles into the text of an executable. Beside it
stands here the roofline of the same fusion: the larger of its bytes over the bandwidth of HBM and
its FLOPs over the peak of the matrix units. The estimates leave out collectives, asynchronous
copies and every Pallas kernel: they flag single fusions and are no step time.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tpu_vl.kernels.chips import Chip
from tpu_vl.precompile.hlo import (
    Computation,
    Instruction,
    Module,
    flops,
    parse_module,
    product_flops,
)

RATIO = 1.2
"""Cycles over roofline from which a fusion is flagged."""

SMALL_S = 3e-6
"""Fusions shorter than this are summed as `small`, not flagged one by one: the compiler charges
about 1.2 us to an operation on nothing, so below two or three times that the ratio says little."""

REASONS = (
    (
        r"/while/body|/cond/branch",
        "runs only where a row asks for it: new sequences, penalties, sampling, log-probabilities",
    ),
    (
        r"/mlp/td,df->tf/|/attention/td,",
        "weights straight from memory, while the next are fetched: the first of three windows is "
        "waited for. Tried: either order of the two products, one fused into the other (equal)",
    ),
    (
        r"text_program\)/gather$",
        "an embedding that is the output matrix too is shared by tokens: rows of other devices "
        "become zeros, a pass over all of them, once a step. Tried: an exchange of the rows "
        "instead of their sum (2.4 times the cycles)",
    ),
    (r"sample_program\)/reduce", "one pass over all logits that compares as it reads"),
)
"""Why a flagged fusion stays: patterns of its scope, first match first."""

_SLICES = ("slice", "dynamic-slice", "gather")
_UNARY = ("bitcast", "convert", "copy", "reshape", "transpose", "negate", "bitcast-convert")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_UNKNOWN_CYCLES = 1 << 62  # what the compiler writes where it has no estimate


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """One fusion, or any other operation with an estimate, as the program runs it once.

    Args:
        name: in the executable's text.
        scope: the operation of the model that it came from.
        cycles: the compiler's estimate.
        num_bytes: operands and results, each once, wherever the compiler placed them: a weight that
            was copied to vector memory ahead of time came over the same bus. Of an operand that
            is only sliced the slices count, of one that is updated in place the updates.
        flops: of its matrix products.
        roofline_cycles: the larger of bytes over bandwidth and FLOPs over peak.
        share: of the program's cycles, of all of `count` together.
        is_small: shorter than `SMALL_S`.
        count: fusions like this one in other layers, itself included.
    """

    name: str
    scope: str
    cycles: int
    num_bytes: float
    flops: int
    roofline_cycles: float
    share: float
    is_small: bool
    count: int = 1

    @property
    def ratio(self) -> float:
        """Cycles over roofline."""
        return self.cycles / max(self.roofline_cycles, 1.0)

    @property
    def reason(self) -> str | None:
        """Why it stays as it is, if that is known."""
        return next((why for pattern, why in REASONS if re.search(pattern, self.scope)), None)

    @property
    def is_flagged(self) -> bool:
        """Whether it is slower than it should be, and long enough to matter by itself."""
        return not self.is_small and self.ratio > RATIO


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that the compiler estimates of one program.

    Args:
        fusions: of every computation that runs, in order.
        cycles: sum over the fusions, loops counted once and of a conditional the longest branch.
        roofline_cycles: the same sum of the fusions' rooflines.
        small_cycles: the part of `cycles` that small fusions take.
        num_kernels, num_collectives, num_loops: what the sum leaves out or counts once.
        unestimated_bytes: operands and results of the operations, scatters and gathers for the
            most part, for which the compiler states no cycles.
    """

    fusions: tuple[Fusion, ...]
    cycles: int
    roofline_cycles: float
    small_cycles: int
    num_kernels: int
    num_collectives: int
    num_loops: int
    unestimated_bytes: float

    @property
    def flagged(self) -> list[Fusion]:
        """Flagged fusions, those of equal layers as one, the largest share first."""
        return _merged([f for f in self.fusions if f.is_flagged])


def flagged_fusions(text: str, chip: Chip) -> list[Fusion]:
    """Fusions slower than `RATIO` times the larger of their bytes and FLOPs.

    Those that layers have in common come as one, the largest share of the program first.

    Args:
        text: `jax.stages.Compiled.as_text()` of a TPU executable.
        chip: what it was compiled for.
    """
    return profile(text, chip).flagged


def profile(text: str, chip: Chip) -> Profile:
    """Every fusion with its estimate and roofline, and the program's sums.

    Args:
        text: `jax.stages.Compiled.as_text()` of a TPU executable.
        chip: what it was compiled for.
    """
    module = parse_module(text)
    running = list(_running(module, module.entry))
    cycles, small, roofline = _sums(module, module.entry, chip)
    fusions = [
        _fusion(module, computation, instruction, chip, cycles)
        for computation in running
        for instruction in computation.instructions.values()
        if _cycles(instruction) is not None
    ]
    unestimated = [
        _roofline(module, computation, instruction, chip)[0]
        for computation in running
        for instruction in computation.instructions.values()
        if instruction.opcode in ("fusion", "copy", "reshape", "transpose")
        and _cycles(instruction) is None
    ]
    everything = [i for c in module.computations.values() for i in c.instructions.values()]
    return Profile(
        fusions=tuple(fusions),
        cycles=cycles,
        roofline_cycles=roofline,
        small_cycles=small,
        num_kernels=sum('custom_call_target="tpu_custom_call"' in i.attributes for i in everything),
        num_collectives=sum(i.opcode.removesuffix("-start") in _COLLECTIVES for i in everything),
        num_loops=sum(i.opcode == "while" for i in everything),
        unestimated_bytes=sum(unestimated),
    )


def _merged(fusions: Sequence[Fusion]) -> list[Fusion]:
    """One fusion, the slowest, for those of the same operation in several layers."""
    groups: dict[tuple[str, str], list[Fusion]] = {}
    for fusion in fusions:
        stem = re.sub(r"[.\d]+$", "", fusion.name)
        scope = re.sub(r"layer_\d+", "layer", fusion.scope)
        groups.setdefault((stem, scope), []).append(fusion)
    merged = [
        replace(
            max(group, key=lambda f: f.ratio),
            scope=scope,
            share=sum(f.share for f in group),
            count=len(group),
        )
        for (_, scope), group in groups.items()
    ]
    return sorted(merged, key=lambda f: -f.share)


def _cycles(instruction: Instruction) -> int | None:
    found = instruction.attribute(r'"estimated_cycles":"(\d+)"')
    return int(found) if found is not None and int(found) < _UNKNOWN_CYCLES else None


def _inner(module: Module, instruction: Instruction) -> list[Computation]:
    """The computations that an instruction schedules; a fusion's own is part of the fusion."""
    if instruction.opcode not in ("while", "conditional", "call", "async-start"):
        return []
    return [module.computations[name] for name in instruction.called()]


def _running(module: Module, computation: Computation) -> Iterator[Computation]:
    yield computation
    for instruction in computation.instructions.values():
        for inner in _inner(module, instruction):
            yield from _running(module, inner)


def _sums(module: Module, computation: Computation, chip: Chip) -> tuple[int, int, float]:
    """Cycles, those of small fusions, and roofline cycles."""
    cycles, small, roofline = 0, 0, 0.0
    for instruction in computation.instructions.values():
        own = _cycles(instruction)
        if own is not None:
            cycles += own
            small += own if own < SMALL_S * chip.clock_hz else 0
            roofline += _roofline(module, computation, instruction, chip)[2]
        inner = [_sums(module, c, chip) for c in _inner(module, instruction)]
        for more in [max(inner)] if inner and instruction.opcode == "conditional" else inner:
            cycles, small, roofline = cycles + more[0], small + more[1], roofline + more[2]
    return cycles, small, roofline


def _fusion(
    module: Module, computation: Computation, instruction: Instruction, chip: Chip, total: int
) -> Fusion:
    cycles = _cycles(instruction)
    assert cycles is not None
    num_bytes, count, roofline = _roofline(module, computation, instruction, chip)
    return Fusion(
        name=instruction.name,
        scope=instruction.attribute(r'op_name="([^"]*)"') or "",
        cycles=cycles,
        num_bytes=num_bytes,
        flops=count,
        roofline_cycles=roofline,
        share=cycles / max(total, 1),
        is_small=cycles < SMALL_S * chip.clock_hz,
    )


def _roofline(
    module: Module, computation: Computation, instruction: Instruction, chip: Chip
) -> tuple[float, int, float]:
    """Bytes, FLOPs and the cycles that the larger of them takes."""
    operands = [computation.instructions[o] for o in dict.fromkeys(instruction.operands)]
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called()[0]]
        count = flops(module, body)
        num_bytes = _bytes_read(module, body, computation, instruction) + _written(module, body)
    else:
        products = instruction.opcode in ("dot", "convolution")
        count = product_flops(computation, instruction) if products else 0
        num_bytes = sum(s.num_bytes for s in instruction.shapes)
        if instruction.opcode in _SLICES:
            num_bytes *= 2
        elif instruction.opcode == "dynamic-update-slice":
            num_bytes = 2 * operands[1].shape.num_bytes
        else:
            num_bytes += sum(s.num_bytes for o in operands for s in o.shapes)
    seconds = max(num_bytes / chip.hbm_bytes_per_s, count / chip.bf16_flops)
    return num_bytes, count, seconds * chip.clock_hz


def _bytes_read(
    module: Module, body: Computation, computation: Computation, instruction: Instruction
) -> float:
    total, seen = 0.0, set()
    for parameter, operand in zip(body.parameters(), instruction.operands, strict=True):
        if operand in seen:
            continue
        seen.add(operand)
        whole = sum(s.num_bytes for s in computation.instructions[operand].shapes)
        total += whole * _share_read(module, body, parameter.name)
    return total


def _share_read(module: Module, body: Computation, name: str) -> float:
    """The share of a value that its users inside a fusion read, at most 1."""
    size = max(body.instructions[name].shape.size, 1)
    total = 0.0
    for user in body.users(name):
        share = partial(_share_read, module)
        if user.opcode in _SLICES and name == user.operands[0]:
            total += user.shape.size / size
        elif user.opcode in ("dynamic-update-slice", "scatter") and name == user.operands[0]:
            total += 0.0  # updated in place
        elif user.opcode == "fusion":
            callee = module.computations[user.called()[0]]
            pairs = zip(callee.parameters(), user.operands, strict=True)
            total += sum(share(callee, p.name) for p, operand in pairs if operand == name)
        elif user.opcode in _UNARY:
            total += share(body, user.name) if not user.is_root else 1.0
        else:
            total += 1.0
    return min(total, 1.0)


def _written(module: Module, body: Computation) -> float:
    root = body.root
    results = [body.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    return sum(r.shape.num_bytes * _share_written(module, body, r) for r in results)


def _share_written(module: Module, body: Computation, result: Instruction) -> float:
    """1, or the updates' share of an array that a fusion updates in place."""
    if result.opcode in _UNARY:
        return _share_written(module, body, body.instructions[result.operands[0]])
    if result.opcode == "fusion":
        callee = module.computations[result.called()[0]]
        return _share_written(module, callee, callee.root) if len(result.shapes) == 1 else 1.0
    update = {"dynamic-update-slice": 1, "scatter": 2}.get(result.opcode)
    if update is None or len(result.shapes) > 1:
        return 1.0
    return min(body.instructions[result.operands[update]].shape.size / result.shape.size, 1.0)
