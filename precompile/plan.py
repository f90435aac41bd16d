"""The plan of a server: does the model fit the devices, and what will it do; as table and JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_vl.kernels.chips import Chip
from tpu_vl.precompile.estimate import (
    DecoderSizes,
    Duration,
    TowerMode,
    TowerSizes,
    capacity_of,
    decode_step,
    prefill_step,
    tower_seconds,
)
from tpu_vl.precompile.footprint import RUNTIME_RESERVE_BYTES, Footprint
from tpu_vl.precompile.program_sizes import ProgramSize

DECODE_SEQUENCES = (1, 16, 64, 256)
PREFILL_TOKENS = (256, 1_024, 2_048)
TOWER_PATCHES = (1_024, 4_096, 16_384)
DECODE_CONTEXT = 2_048
"""Tokens in the cache of each sequence of an estimated decode step, or what the pages hold."""

MIXED = "mixed"
"""Name of the distribution of media whose padding is the plan's; see precompile/traffic.py."""

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a server will be, decided from config values, flags and the chip's facts alone.

    Args:
        model, target: as the operator calls them.
        notes: sentences that limit what the plan says.
        chip: facts of one device.
        num_devices: that the model is split over.
        dtype: of the weights.
        footprint: of one device.
        utilization: share of the device's memory that may be filled.
        kv_tokens: tokens that the KV pages hold.
        max_model_len: prompt plus answer, in tokens.
        programs: temporaries, code and compile seconds of each executable.
        is_compiled: those are the compiler's; else formulas.
        padding_share: of the tower's operations that are padding, by distribution of sizes.
        decode: step time by number of sequences; None where so many have no slot.
        prefill: step time by prompt tokens; None where the step is too small.
        tower: milliseconds of a call of one frame, by patches.
        decode_context: tokens in the cache of each of so many decoding sequences.
        video_patches_max: patches of the largest video that one request may carry.
        flagged_fusions: descriptions, where programs were compiled.
        formula: the footprint by formula, where programs were compiled.
    """

    model: str
    target: str
    notes: tuple[str, ...]
    chip: Chip
    num_devices: int
    dtype: str
    footprint: Footprint
    utilization: float
    kv_tokens: int
    max_model_len: int
    programs: Mapping[str, ProgramSize]
    is_compiled: bool
    padding_share: Mapping[str, float]
    decode: Mapping[int, Duration | None]
    prefill: Mapping[int, Duration | None]
    tower: Mapping[int, float]
    decode_context: Mapping[int, int]
    video_patches_max: int
    flagged_fusions: tuple[str, ...] = ()
    formula: Footprint | None = None

    @property
    def compile_s(self) -> float:
        """Compile seconds of all programs, one after the other."""
        return sum(p.compile_s for p in self.programs.values())

    @property
    def free_bytes(self) -> int:
        """Of one device, beside everything that is planned; negative: does not fit."""
        return self.chip.hbm_bytes - self.footprint.total

    @property
    def fits(self) -> bool:
        """Whether all of it, with one longest request, stays inside the share to be filled."""
        return fits(self.footprint, self.chip, self.utilization) and (
            self.kv_tokens >= self.max_model_len
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as `tpu-vl plan --json` prints it; docs/plan.md names every key."""
        f = self.footprint
        out = {
            "fits": self.fits,
            "hbm_bytes": {
                "weights": f.weights,
                "kv": f.kv,
                "pool": f.pool,
                "temporaries": f.temporaries,
                "code": f.code,
                "free": self.free_bytes,
                "state": f.state,
            },
            "kv_tokens": self.kv_tokens,
            "programs": len(self.programs),
            "padding_share": round(self.padding_share.get(MIXED, 0.0), 4),
            "decode": {str(n): _duration_json(d) for n, d in self.decode.items()},
            "prefill": {str(n): _duration_json(d) for n, d in self.prefill.items()},
            "video_patches_max": self.video_patches_max,
            "model": self.model,
            "target": self.target,
            "tensor_parallel_size": self.num_devices,
            "dtype": self.dtype,
            "device_bytes": self.chip.hbm_bytes,
            "reserve_bytes": RUNTIME_RESERVE_BYTES,
            "compiled": self.is_compiled,
            "compile_s": round(self.compile_s, 1),
            "program_sizes": {
                name: {"temporaries": p.temporaries, "code": p.code, "compile_s": p.compile_s}
                for name, p in self.programs.items()
            },
            "padding_shares": {name: round(x, 4) for name, x in self.padding_share.items()},
            "decode_context": {str(n): tokens for n, tokens in self.decode_context.items()},
            "tower_ms": {str(p): round(ms, 3) for p, ms in self.tower.items()},
            "flagged_fusions": list(self.flagged_fusions),
            "notes": list(self.notes),
        }
        if self.formula is not None:
            out["formula_bytes"] = {
                "temporaries": self.formula.temporaries,
                "code": self.formula.code,
            }
        return out

    def _kept_free(self) -> str:
        """How much of the free memory no plan may use."""
        margin = self.chip.hbm_bytes * (1 - self.utilization) + RUNTIME_RESERVE_BYTES
        reserve = f"the runtime's {RUNTIME_RESERVE_BYTES / _GIB:.2f}"
        left = f"what --hbm-utilization {self.utilization:g} leaves"
        return f"must be at least {margin / _GIB:.3f}: {reserve} and {left}"

    def table(self) -> str:
        """The plan as text."""
        f, gib = self.footprint, _GIB
        verdict = "fits" if self.fits else "DOES NOT FIT"
        lines = [
            f"{self.model} in {self.dtype} on {self.num_devices} x {self.chip.kind} of "
            f"{self.target}: {verdict}",
            *(f"note: {note}" for note in self.notes),
            "",
            f"memory of one device, {self.chip.hbm_bytes / gib:.2f} GiB usable",
        ]
        how = "the compiler's analysis" if self.is_compiled else "by formula"
        rows = [
            ("weights", f.weights, ""),
            ("KV pages", f.kv, f"{self.kv_tokens} tokens"),
            ("media pool", f.pool, ""),
            ("slots", f.state, "page tables, token counts, recurrent state"),
            ("largest temporaries", f.temporaries, how),
            ("program code", f.code, f"{len(self.programs)} programs, {how}"),
            ("free", self.free_bytes, self._kept_free()),
        ]
        lines += [
            f"  {name:<20}{size / gib:>9.3f} GiB  {text}".rstrip() for name, size, text in rows
        ]
        whose = "a thread" if self.is_compiled else "a processor, by formula"
        lines += [
            "",
            f"{len(self.programs)} programs compile in {self.compile_s:.0f} s of {whose}",
            f"largest video of a request: {self.video_patches_max} patches",
            *(
                f"padding of the tower, {name}: {share:.1%}"
                for name, share in self.padding_share.items()
            ),
            "",
            *self._times(),
        ]
        if self.flagged_fusions:
            lines += ["", "fusions slower than 1.2 x their bytes or operations"]
            lines += [f"  {line}" for line in self.flagged_fusions]
        return "\n".join(lines)

    def _times(self) -> list[str]:
        lines = [
            f"{'step':<34}{'estimate':>12}{'roofline':>12}",
        ]
        for n, duration in self.decode.items():
            lines.append(_time_row(f"decode, {n} x {self.decode_context[n]} tokens", duration))
        for n, duration in self.prefill.items():
            row = _time_row(f"prefill, {n} tokens", duration)
            if duration is not None:
                row += f"  {n / duration.estimate_us * 1e6:,.0f} tokens/s"
            lines.append(row)
        for patches, ms in self.tower.items():
            lines.append(f"{f'tower, one frame of {patches} patches':<34}{ms * 1e3:>9,.0f} us")
        return lines


def _duration_json(duration: Duration | None) -> dict[str, float] | None:
    if duration is None:
        return None
    return {
        "estimate_us": round(duration.estimate_us, 1),
        "roofline_us": round(duration.roofline_us, 1),
    }


def _time_row(name: str, duration: Duration | None) -> str:
    if duration is None:
        return f"{name:<34}{'no program holds so many':>24}"
    return f"{name:<34}{duration.estimate_us:>9,.0f} us{duration.roofline_us:>9,.0f} us"


def fits(footprint: Footprint, chip: Chip, utilization: float) -> bool:
    """Whether a device holds a footprint and the runtime's reserve in the share to be filled."""
    return footprint.total + RUNTIME_RESERVE_BYTES <= chip.hbm_bytes * utilization


def decode_contexts(kv_tokens: int, max_model_len: int) -> dict[int, int]:
    """Tokens in the cache of each of 1, 16, ... decoding sequences, as far as the pages go."""
    return {n: max(min(DECODE_CONTEXT, max_model_len, kv_tokens // n), 1) for n in DECODE_SEQUENCES}


def step_times(
    decoder: DecoderSizes,
    chip: Chip,
    num_devices: int,
    capacities: tuple[int, ...],
    max_num_seqs: int,
    contexts: Mapping[int, int],
) -> tuple[dict[int, Duration | None], dict[int, Duration | None]]:
    """Decode and prefill times of a server's text programs.

    Args:
        decoder: sizes.
        chip, num_devices: where it runs.
        capacities: token capacities, ascending.
        max_num_seqs: sequences with a slot.
        contexts: `decode_contexts(...)`.
    """
    decode = {
        n: decode_step(decoder, n, context, chip, num_devices, capacities)
        if n <= max_num_seqs
        else None
        for n, context in contexts.items()
    }
    prefill = {
        n: prefill_step(
            decoder,
            n,
            chip,
            num_devices,
            capacities,
            min(capacity_of(n, capacities) or 0, max_num_seqs),
        )
        for n in PREFILL_TOKENS
    }
    return decode, prefill


def tower_times(
    tower: TowerSizes | None,
    chip: Chip,
    num_devices: int,
    mode: TowerMode,
    row_block: int,
    max_frame_patches: int,
) -> dict[int, float]:
    """Milliseconds of a tower call of one frame, by patches; {} without a tower."""
    if tower is None:
        return {}
    return {
        p: 1e3 * tower_seconds(tower, p, 1, chip, num_devices, mode, row_block)
        for p in TOWER_PATCHES
        if p <= max_frame_patches
    }


def video_patches_max(
    *,
    request_patches: int,
    video_pixels: int,
    patch_pixels: int,
    merge_cells: int,
    max_model_len: int,
    overhead_tokens: int,
) -> int:
    """Patches of the largest video that one request may carry.

    Args:
        request_patches: limit on all media of a request.
        video_pixels: the processor's limit on frames * height * width.
        patch_pixels: pixels of one patch over its frames.
        merge_cells: patches of one token.
        max_model_len: prompt plus answer, in tokens.
        overhead_tokens: kept for text, time stamps and one answer token.
    """
    by_context = max(max_model_len - overhead_tokens, 0) * merge_cells
    return min(request_patches, video_pixels // patch_pixels, by_context)
