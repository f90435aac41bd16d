"""Temporaries, code and compile time of each program, by formulas fitted to compiled programs.

The compiler decides all three; the formulas only have to be near before it has run. What they were
fitted to, and how far they are from it, is in docs/plan.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout
from tpu_vl.kernels.checks import NUM_LANES
from tpu_vl.precompile.programs import ZEROS

_MB = 10**6


@dataclass(frozen=True, kw_only=True)
class ProgramSize:
    """One program on one device.

    Args:
        temporaries: bytes that it needs while it runs, results that replace nothing included.
        code: bytes of the executable in the device's memory.
        compile_s: processor seconds of its compilation.
    """

    temporaries: int
    code: int
    compile_s: float


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What program sizes follow from.

    Args:
        num_layers, width, vocab_size: of the language model.
        num_devices: on the "model" axis.
        tower_width: of the vision tower; 0 without one.
        tower_heads: its heads on one device.
        num_bins: patches of a call are dealt into so many bins, one per device.
    """

    num_layers: int
    width: int
    vocab_size: int
    num_devices: int
    tower_width: int = 0
    tower_heads: int = 0
    num_bins: int = 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was measured of one model's programs, on one device; tables by capacity.

    Args:
        num_layers, width: of its language model.
        logits: on one device, of a row.
        text_code, sample_code: megabytes.
        encode_code: megabytes, by the sizes that a call's last block may take.
        text_temporaries, sample_temporaries: megabytes, without those of `layer_temporaries`.
        layer_temporaries: megabytes that every attention kernel's call keeps for itself.
        encode_temporaries: megabytes that a tower call takes at the least.
        encode_copies: of the hidden rows, q, k, v and attended rows of a large tower call.
        encode_spared: megabytes of them that never leave the core.
        text_seconds, sample_seconds, encode_seconds: of a processor; the last as `encode_code`.
    """

    num_layers: int
    width: int
    logits: int
    text_code: Mapping[int, float]
    text_temporaries: Mapping[int, float]
    layer_temporaries: float
    text_seconds: Mapping[int, float]
    sample_code: Mapping[int, float]
    sample_temporaries: Mapping[int, float]
    sample_seconds: Mapping[int, float]
    encode_code: Mapping[int, float]
    encode_temporaries: Mapping[int, float]
    encode_copies: float
    encode_spared: float
    encode_seconds: Mapping[int, float]


# Qwen3-VL-8B, tensor parallel 4, v6e, jax 0.10.2 with libtpu 0.0.42: `python -m bench.fit_sizes
# --write` measures it and replaces it.
FITTED = Fit(
    num_layers=36,
    width=4096,
    logits=38016,
    text_code={4: 5.1, 16: 5.3, 64: 5.8, 256: 8.7, 1024: 11.7, 2048: 14.0},
    text_temporaries={4: -1.5, 16: -1.4, 64: -0.7, 256: 1.6, 1024: 25.7, 2048: 20.4},
    layer_temporaries=1.385,
    text_seconds={4: 23, 16: 24, 64: 29, 256: 50, 1024: 51, 2048: 52},
    sample_code={4: 2.4, 16: 3.5, 64: 5.6, 256: 5.9},
    sample_temporaries={4: 2.3, 16: 4.5, 64: 11.9, 256: 158.1},
    sample_seconds={4: 6, 16: 9, 64: 24, 256: 22},
    encode_code={1: 12.4, 4: 20.2},
    encode_temporaries={1024: 20.7, 4096: 25.1},
    encode_copies=1.1983,
    encode_spared=72.5,
    encode_seconds={1: 43, 4: 79},
)


def program_sizes(
    shape: ModelShape, engine_config: EngineConfig, fit: Fit = FITTED
) -> dict[str, ProgramSize]:
    """The size of every program, by name.

    Args:
        shape: the model on its devices.
        engine_config: capacities.
        fit: what was measured.
    """
    sizes = {ZEROS: ProgramSize(temporaries=0, code=_MB // 3, compile_s=1.0)}
    for p in engine_config.patch_capacities:
        sizes[layout.encode_name(p)] = encode_size(shape, p, engine_config.steps_of(p), fit)
    for t in engine_config.token_capacities:
        sizes[layout.text_name(t)] = text_size(shape, t, fit)
    for r in layout.sample_capacities(engine_config):
        sizes[layout.sample_name(r)] = sample_size(shape, r, fit)
    return sizes


def total_code(shape: ModelShape, engine_config: EngineConfig) -> int:
    """Bytes of the code of all programs on one device."""
    return sum(size.code for size in program_sizes(shape, engine_config).values())


def text_size(shape: ModelShape, num_tokens: int, fit: Fit) -> ProgramSize:
    """A text program of so many tokens: code in every layer, temporaries of the widest step."""
    layers, width = shape.num_layers / fit.num_layers, shape.width / fit.width
    temporaries = interpolated(fit.text_temporaries, num_tokens) * width
    return ProgramSize(
        temporaries=max(0, int(_MB * (temporaries + fit.layer_temporaries * shape.num_layers))),
        code=int(_MB * interpolated(fit.text_code, num_tokens) * layers),
        compile_s=interpolated(fit.text_seconds, num_tokens) * layers,
    )


def sample_size(shape: ModelShape, num_rows: int, fit: Fit) -> ProgramSize:
    """A sampling program of so many rows: temporaries are copies of its logits."""
    logits = shape.vocab_size / shape.num_devices / fit.logits
    return ProgramSize(
        temporaries=int(_MB * interpolated(fit.sample_temporaries, num_rows) * logits),
        code=int(_MB * interpolated(fit.sample_code, num_rows)),
        compile_s=interpolated(fit.sample_seconds, num_rows),
    )


def encode_size(shape: ModelShape, num_patches: int, row_steps: int, fit: Fit) -> ProgramSize:
    """A tower program of so many patches: three of its hidden rows, and q, k, v, attended."""
    patches = num_patches // shape.num_bins
    row = encode_row_bytes(shape) * fit.encode_copies
    least = interpolated(fit.encode_temporaries, min(patches, max(fit.encode_temporaries)))
    return ProgramSize(
        temporaries=int(max(patches * row - _MB * fit.encode_spared, _MB * least)),
        code=int(_MB * interpolated(fit.encode_code, row_steps)),
        compile_s=interpolated(fit.encode_seconds, row_steps),
    )


def encode_row_bytes(shape: ModelShape) -> int:
    """Bytes of one patch's hidden rows, q, k, v and attended row on one device, each once."""
    return 2 * (3 * shape.tower_width + 4 * shape.tower_heads * NUM_LANES)


def interpolated(table: Mapping[int, float], size: int) -> float:
    """A measured table between its points, straight over the logarithm of the size.

    Below the first point its value holds; beyond the last, the slope of the last two goes on.
    """
    points = sorted(table.items())
    if size <= points[0][0] or len(points) == 1:
        return points[0][1]
    pair = next(((a, b) for a, b in pairwise(points) if size <= b[0]), (points[-2], points[-1]))
    (low, at_low), (high, at_high) = pair
    share = math.log(size / low) / math.log(high / low)
    return at_low + share * (at_high - at_low)
