"""Reads the compiler's own text of an executable: computations, instructions, shapes, FLOPs."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "token": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")


@dataclass(frozen=True)
class Shape:
    """One array: its dtype name, dims and the memory space (0 is HBM, 1 vector memory)."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> float:
        """Bytes of the elements, without the padding of their tiles."""
        bits = _ITEM_BITS.get(self.dtype)
        if bits is None:
            bits = int(re.sub(r"^[a-z]+(\d+).*$", r"\1", self.dtype))
        return self.size * bits / 8


@dataclass(frozen=True)
class Instruction:
    """One line: `name = shapes opcode(operands), attributes`."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    argument: str
    attributes: str
    is_root: bool

    @property
    def shape(self) -> Shape:
        """The only shape of an instruction that gives one array."""
        return self.shapes[0]

    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        found = _CALLED.findall(self.attributes)
        return tuple(name for group in found for name in _NAME.findall(group))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions in order, and by name."""

    name: str
    instructions: Mapping[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """What it gives."""
        return next(i for i in self.instructions.values() if i.is_root)

    def parameters(self) -> list[Instruction]:
        """Its parameters by number."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.argument))

    def users(self, name: str) -> Iterator[Instruction]:
        """The instructions that read a value."""
        return (i for i in self.instructions.values() if name in i.operands)


@dataclass(frozen=True)
class Module:
    """All computations, and the one that the program starts with."""

    computations: Mapping[str, Computation]
    entry: Computation


def parse_module(text: str) -> Module:
    """The computations of an executable's text.

    Args:
        text: what `jax.stages.Compiled.as_text()` gives for a TPU.

    Raises:
        ValueError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    lines: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = {}
            computation = Computation(header.group(2), lines)
            computations[computation.name] = computation
            entry = computation if header.group(1) else entry
        elif line.startswith("  ") and " = " in line:
            instruction = _instruction(line.strip())
            lines[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text of the executable has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    is_root = line.startswith("ROOT ")
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _end_of(rest, " ")
    shapes = tuple(_shapes(rest[:end]))
    opcode, _, rest = rest[end + 1 :].partition("(")
    end = _end_of(rest, ")")
    argument = rest[:end]
    return Instruction(
        name=name.removeprefix("%"),
        shapes=shapes,
        opcode=opcode,
        operands=tuple(_NAME.findall(argument)),
        argument=argument,
        attributes=rest[end + 1 :],
        is_root=is_root,
    )


def _end_of(text: str, stop: str) -> int:
    """Where `stop` stands outside all brackets."""
    depth = 0
    for position, char in enumerate(text):
        if depth == 0 and char == stop:
            return position
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
    raise ValueError(f"no {stop!r} closes {text[:80]!r}")


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(d) for d in dims.split(",") if d)
        yield Shape(dtype, sizes, int(space.group(1)) if space else 0)


def flops(module: Module, computation: Computation) -> int:
    """Multiplications and additions of the matrix products of a computation and what it calls."""
    total = 0
    for instruction in computation.instructions.values():
        if instruction.opcode in ("dot", "convolution"):
            total += product_flops(computation, instruction)
        elif instruction.opcode == "fusion":
            total += sum(flops(module, module.computations[c]) for c in instruction.called())
    return total


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """Multiplications and additions of one dot or convolution."""
    left, right = (computation.instructions[o].shape for o in instruction.operands[:2])
    if instruction.opcode == "dot":
        dims = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2 * instruction.shape.size * math.prod(left.dims[int(d)] for d in dims.split(","))
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)")
    assert labels is not None
    left_labels, _, rest = labels.partition("_")
    right_labels, _, out_labels = rest.partition("->")
    out = instruction.shape.dims
    count = 2 * out[out_labels.index("b")] * out[out_labels.index("f")]
    count *= right.dims[right_labels.index("i")]
    for dim in range(len(left_labels) - 2):
        label = str(dim)
        sizes = (left.dims[left_labels.index(label)], out[out_labels.index(label)])
        count *= _taps(instruction, dim, right.dims[right_labels.index(label)], *sizes)
    return count


def _taps(instruction: Instruction, dim: int, window: int, size: int, size_out: int) -> int:
    """Pairs of an output position and a window position that meet an input, not its padding."""

    def setting(name: str, default: str) -> list[int]:
        found = instruction.attribute(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)")
        return [int(n) for n in (found.split("x")[dim] if found else default).split("_")]

    stride, spread = setting("stride", "1")[0], setting("rhs_dilate", "1")[0]
    gap, low = setting("lhs_dilate", "1")[0], setting("pad", "0_0")[0]
    last = (size - 1) * gap
    at = (o * stride + k * spread - low for k in range(window) for o in range(size_out))
    return sum(0 <= position <= last and position % gap == 0 for position in at)
