"""What the TPU compiler makes of every program, on a machine without a TPU.

python -m bench.compiled --model tests/configs/qwen3_vl_8b.json -tp 4 --target v6e:2x2
python -m bench.compiled ... --programs text/64 sample/64 --json

One line per program: code and temporaries in the device's memory, processor seconds of its
compilation, the compiler's cycles beside the roofline, and the fusions that are slower than 1.2
times their own bytes and FLOPs. Other flags are those of `tpu-vl serve`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu_vl.checkpoint import open_checkpoint
from tpu_vl.flags import SizeFlags, add_flags, read_flags
from tpu_vl.kernels.chips import CHIPS, Chip
from tpu_vl.mesh import make_mesh
from tpu_vl.planning import temporary_bytes
from tpu_vl.precompile.compile import compile_program
from tpu_vl.precompile.fusions import Fusion, profile
from tpu_vl.precompile.programs import Program
from tpu_vl.precompile.targets import describe_devices, parse_target
from tpu_vl.sized import list_programs, size_model


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compiled program.

    Args:
        name: of the program.
        code_bytes, temporary_bytes: on each device.
        argument_bytes, alias_bytes: of what it takes, and of that updates in place.
        compile_s: processor seconds, tracing included.
        num_kernels: Pallas calls.
        cycles, roofline_cycles, small_cycles, num_loops, unestimated_bytes: see `fusions.Profile`.
        flagged: slow fusions.
    """

    name: str
    code_bytes: int
    temporary_bytes: int
    argument_bytes: int
    alias_bytes: int
    compile_s: float
    num_kernels: int
    cycles: int
    roofline_cycles: float
    small_cycles: int
    num_loops: int
    unestimated_bytes: float
    flagged: list[Fusion]

    def to_json(self) -> str:
        """One line of JSON."""
        flagged = [asdict(f) | {"ratio": f.ratio, "reason": f.reason} for f in self.flagged]
        return json.dumps(asdict(self) | {"flagged": flagged})


def measure(program: Program, chip: Chip) -> Row:
    """Compiles one program in this process."""
    begun = time.process_time()
    compiled = compile_program(program)
    compile_s = time.process_time() - begun
    memory: Any = compiled.memory_analysis()
    found = profile(compiled.as_text() or "", chip)
    return Row(
        name=program.name,
        code_bytes=memory.generated_code_size_in_bytes,
        temporary_bytes=temporary_bytes(program, memory),
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        compile_s=round(compile_s, 1),
        num_kernels=found.num_kernels,
        cycles=found.cycles,
        roofline_cycles=round(found.roofline_cycles),
        small_cycles=found.small_cycles,
        num_loops=found.num_loops,
        unestimated_bytes=found.unestimated_bytes,
        flagged=found.flagged,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows for people, with their sum and the flagged fusions behind them."""
    head = "| program | code MB | temp MB | compile CPU s | M cycles | roofline | small | flagged |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r.name} | {r.code_bytes / 1e6:.1f} | {r.temporary_bytes / 1e6:.1f} | "
            f"{r.compile_s:.1f} | {r.cycles / 1e6:.2f} | {r.roofline_cycles / 1e6:.2f} | "
            f"{r.small_cycles / 1e6:.2f} | {len(r.flagged)} |"
        )
    code, seconds = sum(r.code_bytes for r in rows), sum(r.compile_s for r in rows)
    lines.append(f"| sum | {code / 1e6:.1f} | | {seconds:.1f} | | | | |")
    for r in rows:
        lines += [f"{r.name}: {describe(fusion)}" for fusion in r.flagged]
    return "\n".join(lines)


def describe(fusion: Fusion) -> str:
    """One flagged fusion in words."""
    return (
        f"{fusion.count} x {fusion.name}: {fusion.cycles} cycles, {fusion.ratio:.2f} x its "
        f"roofline, {fusion.share:.1%} of the program ({fusion.scope}): "
        f"{fusion.reason or 'no reason known'}"
    )


def listed_programs(flags: SizeFlags, target: str) -> tuple[list[Program], Chip]:
    """The programs of a model from its config.json, for a slice that need not be there."""
    slice_ = parse_target(target)
    mesh = make_mesh(flags.tensor_parallel_size, describe_devices(slice_))
    model = size_model(flags, open_checkpoint(flags.model, configs_only=True), mesh)
    return list(list_programs(model)), CHIPS[slice_.machine.chip]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="v6e:2x2", help="topology or GKE machine type")
    parser.add_argument("--programs", nargs="+", help="names (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser, SizeFlags)
    parsed = parser.parse_args(arguments)
    programs, chip = listed_programs(read_flags(SizeFlags, parsed, os.environ), parsed.target)
    rows = []
    for program in programs:
        if parsed.programs and program.name not in parsed.programs:
            continue
        rows.append(measure(program, chip))
        print(rows[-1].to_json() if parsed.json else rows[-1].name, flush=True)
    if not parsed.json:
        print(table(rows))


if __name__ == "__main__":
    sys.exit(main())
