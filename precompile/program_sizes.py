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
        layer_values: weights of one decoder layer on one device.
        kv_heads: K/V heads on one device.
        tower_width: of the vision tower; 0 without one.
        tower_heads: its heads on one device.
        num_bins: patches of a call are dealt into so many bins, one per device.
    """

    num_layers: int
    width: int
    vocab_size: int
    num_devices: int
    layer_values: int
    kv_heads: int
    tower_width: int = 0
    tower_heads: int = 0
    num_bins: int = 1


def program_sizes(shape: ModelShape, engine_config: EngineConfig) -> dict[str, ProgramSize]:
    """The size of every program, by name.

    Args:
        shape: the model on its devices.
        engine_config: capacities.
    """
    sizes = {ZEROS: ProgramSize(temporaries=0, code=_MB // 3, compile_s=1.0)}
    for p in engine_config.patch_capacities:
        sizes[layout.encode_name(p)] = encode_size(shape, p)
    for t in engine_config.token_capacities:
        sizes[layout.text_name(t)] = text_size(shape, t)
    for r in layout.sample_capacities(engine_config):
        sizes[layout.sample_name(r)] = sample_size(shape, r)
    return sizes


def total_code(shape: ModelShape, engine_config: EngineConfig) -> int:
    """Bytes of the code of all programs on one device."""
    return sum(size.code for size in program_sizes(shape, engine_config).values())


def interpolated(table: Mapping[int, float], size: int) -> float:
    """A measured table between its points, straight over the logarithm of the size.

    Below the first point its value holds; beyond the last, the slope of the last two goes on.
    """
    points = sorted(table.items())
    if size <= points[0][0]:
        return points[0][1]
    pair = next(((a, b) for a, b in pairwise(points) if size <= b[0]), (points[-2], points[-1]))
    (low, at_low), (high, at_high) = pair
    share = math.log(size / low) / math.log(high / low)
    return at_low + share * (at_high - at_low)


# Qwen3-VL-8B, tensor parallel 4, v6e, jax 0.10.2 with libtpu 0.0.42: megabytes by capacity.
_TEXT_CODE = {4: 5.7, 16: 6.2, 64: 7.0, 256: 9.5, 1_024: 14.1, 2_048: 15.8}
_TEXT_TEMPORARIES = {4: 3.0, 16: 3.1, 64: 3.9, 256: 5.0, 1_024: 100.7, 2_048: 87.0}
_TEXT_SECONDS = {4: 20.0, 64: 30.0, 256: 40.0, 1_024: 60.0, 2_048: 70.0}
_SAMPLE_CODE = {4: 3.4, 16: 5.8, 64: 10.6, 256: 14.4}
_ENCODE_CODE = {1_024: 31.6, 4_096: 19.3}
_ENCODE_TEMPORARIES = {1_024: 21.6, 4_096: 40.9}
_ENCODE_COPIES = 1.04
_IN_VECTOR_MEMORY = 53.1
"""Megabytes of a tower call's rows that never leave the core."""

_FITTED_LAYERS, _FITTED_WIDTH = 36, 4_096

_CALL_TEMPORARIES = 1.06
"""Megabytes that every attention kernel's call keeps for itself."""


def text_size(shape: ModelShape, num_tokens: int) -> ProgramSize:
    """A text program of so many tokens."""
    layers = shape.num_layers / _FITTED_LAYERS
    width = shape.width / _FITTED_WIDTH
    temporaries = interpolated(_TEXT_TEMPORARIES, num_tokens) * width
    return ProgramSize(
        temporaries=int(_MB * (temporaries + _CALL_TEMPORARIES * shape.num_layers)),
        code=int(_MB * interpolated(_TEXT_CODE, num_tokens) * layers),
        compile_s=interpolated(_TEXT_SECONDS, num_tokens) * layers,
    )


def sample_size(shape: ModelShape, num_rows: int) -> ProgramSize:
    """A sampling program of so many rows: several copies of its float32 logits."""
    logits = 4 * num_rows * shape.vocab_size / shape.num_devices
    return ProgramSize(
        temporaries=int(7 * logits),
        code=int(_MB * interpolated(_SAMPLE_CODE, num_rows)),
        compile_s=25.0,
    )


def encode_size(shape: ModelShape, num_patches: int) -> ProgramSize:
    """A tower program of so many patches: three of its hidden rows, and q, k, v, attended."""
    patches = num_patches // shape.num_bins
    row = 2 * (3 * shape.tower_width + 4 * shape.tower_heads * NUM_LANES) * _ENCODE_COPIES
    least = interpolated(_ENCODE_TEMPORARIES, min(patches, max(_ENCODE_TEMPORARIES)))
    return ProgramSize(
        temporaries=int(max(patches * row - _MB * _IN_VECTOR_MEMORY, _MB * least)),
        code=int(_MB * interpolated(_ENCODE_CODE, min(num_patches, max(_ENCODE_CODE)))),
        compile_s=90.0,
    )
