"""Fits the plan's formulas of program sizes to what the TPU compiler makes of the programs today.

python -m bench.fit_sizes --rows rows.jsonl --write

Compiles every program of Qwen3-VL-8B for v6e:2x2 with tensor parallel 4, one after another: about
ten minutes of two cores. Each is added to the file of rows when it is done; what the file holds
already is not compiled again, so delete it after a program has changed. Prints the constants and,
program by program, the compiler beside the formula. `--write` puts both where they belong: into
precompile/program_sizes.py and docs/plan.md.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.compiled import measure
from tpu_vl.checkpoint import open_checkpoint
from tpu_vl.config import EngineConfig
from tpu_vl.flags import SizeFlags
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile import footprint
from tpu_vl.precompile.program_sizes import (
    Fit,
    ModelShape,
    ProgramSize,
    encode_row_bytes,
    program_sizes,
)
from tpu_vl.precompile.programs import ZEROS, make_backend
from tpu_vl.precompile.targets import describe_devices, parse_target
from tpu_vl.sized import SizedModel, list_programs, size_model

ROOT = Path(__file__).resolve().parents[1]
MODEL, TARGET, NUM_DEVICES = ROOT / "tests" / "configs" / "qwen3_vl_8b.json", "v6e:2x2", 4
SOURCE, DOCUMENT = ROOT / "precompile" / "program_sizes.py", ROOT / "docs" / "plan.md"

SHORT_LAYERS = 12
"""Of the second model, by which temporaries of every layer are told from the others."""

_MB = 10**6
_SUMS = r"In all, [\d,]+ MB used by the compiler and [\d,]+ by formula"
_HEAD = "| program | temporaries | formula | code | formula |\n|---|---|---|---|---|\n"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that a fit is made of.

    Args:
        shape, engine_config: the model.
        sizes: its programs as compiled.
        short: its smallest text program with `SHORT_LAYERS` layers.
    """

    shape: ModelShape
    engine_config: EngineConfig
    sizes: Mapping[str, ProgramSize]
    short: ProgramSize


def fit(measured: Measured) -> Fit:
    """The constants that meet the compiled programs."""
    shape, e, sizes = measured.shape, measured.engine_config, measured.sizes
    smallest = sizes[f"text/{e.token_capacities[0]}"]
    layer = (smallest.temporaries - measured.short.temporaries) / (shape.num_layers - SHORT_LAYERS)
    text, sample = _by_size(sizes, "text"), _by_size(sizes, "sample")
    encode = _by_size(sizes, "encode")
    *small, low, high = encode
    slope = (encode[high].temporaries - encode[low].temporaries) / (high - low)
    by_steps = {e.steps_of(p): size for p, size in encode.items()}
    return Fit(
        num_layers=shape.num_layers,
        width=shape.width,
        logits=shape.vocab_size // shape.num_devices,
        text_code=_megabytes({t: size.code for t, size in text.items()}),
        text_temporaries=_megabytes(
            {t: size.temporaries - layer * shape.num_layers for t, size in text.items()}
        ),
        layer_temporaries=round(layer / _MB, 3),
        text_seconds={t: round(size.compile_s) for t, size in text.items()},
        sample_code=_megabytes({r: size.code for r, size in sample.items()}),
        sample_temporaries=_megabytes({r: size.temporaries for r, size in sample.items()}),
        sample_seconds={r: round(size.compile_s) for r, size in sample.items()},
        encode_code=_megabytes({n: size.code for n, size in by_steps.items()}),
        encode_temporaries=_megabytes({p: encode[p].temporaries for p in small}),
        encode_copies=round(slope / encode_row_bytes(shape), 4),
        encode_spared=round((low * slope - encode[low].temporaries) / _MB, 1),
        encode_seconds={n: round(size.compile_s) for n, size in sorted(by_steps.items())},
    )


def _by_size(sizes: Mapping[str, ProgramSize], kind: str) -> dict[int, ProgramSize]:
    """Programs of one kind by their capacity, ascending."""
    found = {n.partition("/")[2]: s for n, s in sizes.items() if n.startswith(f"{kind}/")}
    return {int(size): found[size] for size in sorted(found, key=int)}


def _megabytes(table: Mapping[int, float]) -> dict[int, float]:
    return {key: round(value / _MB, 1) for key, value in sorted(table.items())}


def source(fitted: Fit) -> str:
    """The constants as they stand in `program_sizes.py`."""
    lines = [f"    {f.name}={getattr(fitted, f.name)!r},\n" for f in fields(Fit)]
    return "FITTED = Fit(\n" + "".join(lines) + ")\n"


def table(measured: Mapping[str, ProgramSize], formula: Mapping[str, ProgramSize]) -> str:
    """The table of docs/plan.md, in megabytes."""

    def line(name: str, *num_bytes: float) -> str:
        return f"| {name} | {' | '.join(f'{b / _MB:.1f}' for b in num_bytes)} |\n"

    rows = [
        line(name, size.temporaries, formula[name].temporaries, size.code, formula[name].code)
        for name, size in measured.items()
        if name != ZEROS
    ]
    both = (measured, formula)
    largest = [max(size.temporaries for size in sizes.values()) for sizes in both]
    code = [sum(size.code for size in sizes.values()) for sizes in both]
    return _HEAD + "".join(rows) + line("largest, sum", *largest, *code)


def compiled_sizes(model: SizedModel, rows: Path, only: str = "", label: str = "") -> Any:
    """The sizes of a model's programs, from the file of rows or by compiling.

    Args:
        model: on described devices.
        rows: a JSON object a line; grows.
        only: the name of one program; "" compiles all.
        label: set before the names in the file.
    """
    chip = CHIPS[parse_target(TARGET).machine.chip]
    lines = rows.read_text().splitlines() if rows.exists() else []
    known = {row["name"]: row for row in map(json.loads, lines)}
    sizes = {}
    for program in list_programs(model):
        name = label + program.name
        if only not in ("", program.name):
            continue
        if name not in known:
            row = json.loads(measure(program, chip).to_json())
            known[name] = row | {"name": name}
            with rows.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
        row = known[name]
        print(f"{name}: {row['code_bytes'] / _MB:.1f} MB, {row['compile_s']} s", flush=True)
        sizes[program.name] = ProgramSize(
            temporaries=row["temporary_bytes"], code=row["code_bytes"], compile_s=row["compile_s"]
        )
    return sizes


def sized(model: Path) -> SizedModel:
    """A config.json on the described slice."""
    flags = SizeFlags(model=str(model), tensor_parallel_size=NUM_DEVICES)
    mesh = make_mesh(NUM_DEVICES, describe_devices(parse_target(TARGET)))
    return size_model(flags, open_checkpoint(str(model), configs_only=True), mesh)


def measure_all(model: SizedModel, rows: Path) -> Measured:
    """Every program of the model, and the smallest text program of a shorter one."""
    e = model.engine_config
    sizes = compiled_sizes(model, rows)
    config = json.loads(MODEL.read_text())
    config["text_config"]["num_hidden_layers"] = SHORT_LAYERS
    name = f"text/{e.token_capacities[0]}"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        short = compiled_sizes(sized(path), rows, name, f"{SHORT_LAYERS} layers, ")
    shape = footprint.model_shape(model.family, model.cfg, model.mesh)
    return Measured(shape=shape, engine_config=e, sizes=sizes, short=short[name])


def replaced(text: str, pattern: str, new: str) -> str:
    """`text` with the one match of a pattern replaced."""
    text, count = re.subn(pattern, lambda _: new, text, flags=re.MULTILINE | re.DOTALL)
    assert count == 1, pattern
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True, help="file of what was compiled")
    parser.add_argument("--write", action="store_true", help="replace the constants and the table")
    parsed = parser.parse_args(arguments)
    model = sized(MODEL)
    measured = measure_all(model, parsed.rows)
    fitted = fit(measured)
    formula = program_sizes(measured.shape, measured.engine_config, fitted)
    constants, lines = source(fitted), table(measured.sizes, formula)
    held = footprint.footprint(
        model.family, model.cfg, model.engine_config, make_backend(model.mesh, model.engine_config)
    )
    used = [held.with_programs(sizes).total / _MB for sizes in (measured.sizes, formula)]
    print(constants, lines, sep="\n")
    sums = f"In all, {used[0]:,.0f} MB used by the compiler and {used[1]:,.0f} by formula"
    print(sums)
    print(f"{sum(size.compile_s for size in measured.sizes.values()):.0f} processor seconds")
    if parsed.write:
        SOURCE.write_text(replaced(SOURCE.read_text(), r"^FITTED = Fit\(.*?^\)\n", constants))
        text = replaced(DOCUMENT.read_text(), _SUMS, sums)
        DOCUMENT.write_text(replaced(text, re.escape(_HEAD) + r".*?^\| largest, sum .*?\n", lines))


if __name__ == "__main__":
    main()
