"""Named shapes of vision attention, shared by tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Args:
        num_rows: P, the capacity.
        num_heads: N, of the whole model.
        width: H.
        segments: patches of each frame; the rest of P is padding.
        dtype: of q, k and v.
        tp: devices that the heads are spread over; every device has them all if N does not divide.
    """

    num_rows: int
    num_heads: int
    width: int
    segments: tuple[int, ...]
    dtype: str = "float32"
    tp: int = 1


SMALL: dict[str, Case] = {
    "one_full": Case(num_rows=64, num_heads=4, width=16, segments=(64,)),
    "one_padded": Case(num_rows=64, num_heads=4, width=16, segments=(36,)),
    "three_sizes": Case(num_rows=128, num_heads=3, width=24, segments=(16, 64, 20)),
    "across_blocks": Case(num_rows=600, num_heads=2, width=8, segments=(250, 12, 280)),
    "many_tiny": Case(num_rows=600, num_heads=2, width=8, segments=(4,) * 75),
    "one_patch": Case(num_rows=16, num_heads=2, width=8, segments=(1,)),
    "nothing": Case(num_rows=16, num_heads=2, width=8, segments=()),
    "bfloat16": Case(num_rows=128, num_heads=4, width=24, segments=(48, 60), dtype="bfloat16"),
    "width_64": Case(num_rows=128, num_heads=2, width=64, segments=(100,), dtype="bfloat16"),
    "width_72": Case(num_rows=256, num_heads=2, width=72, segments=(128, 120), dtype="bfloat16"),
    "width_80": Case(num_rows=192, num_heads=1, width=80, segments=(64, 64, 48), dtype="bfloat16"),
    "width_128": Case(num_rows=160, num_heads=2, width=128, segments=(33, 127)),
    "edge_of_a_block": Case(num_rows=1024, num_heads=1, width=8, segments=(512, 512)),
    "behind_an_edge": Case(num_rows=1600, num_heads=1, width=8, segments=(513, 511, 1)),
    "windows": Case(num_rows=1024, num_heads=1, width=8, segments=(64,) * 15 + (32,)),
    "a_long_one_and_tiny": Case(num_rows=1600, num_heads=1, width=8, segments=(1300,) + (3,) * 70),
}

# Models whose towers have the same heads: one of them stands for all.
TOWERS: dict[str, tuple[str, ...]] = {
    "qwen3_vl_2b": ("qwen3_vl_4b",),
    "qwen3_vl_8b": (
        "qwen3_vl_32b",
        "qwen3_vl_30b_a3b",
        "qwen3_vl_235b_a22b",
        "qwen3_5_27b",
        "qwen3_5_35b_a3b",
        "qwen3_5_397b_a17b",
        "qwen3_6_27b",
        "qwen3_6_35b_a3b",
    ),
    "qwen2_5_vl_7b": (),
}
NUM_HEADS = 16
WIDTHS = {"qwen3_vl_2b": 64, "qwen3_vl_8b": 72, "qwen2_5_vl_7b": 80}

# What a call holds: capacity and segments. A window of Qwen2.5-VL has 64 patches, at the edge of
# an image fewer.
_FRAMES = {
    "tower_256": (256, (256,)),
    "tower_1024": (1024, (1024,)),
    "tower_4096": (4096, (4096,)),
    "tower_16384": (16384, (16384,)),
    "tower_65536": (65536, (65536,)),
    "frames_16384": (16384, (1024,) * 16),
    "images_4096": (4096, (1296, 64, 1600, 256, 520)),
}
_WINDOWS = {
    "windows_4096": (4096, (64,) * 64),
    "edge_windows_4096": (4096, (64, 64, 64, 48) * 15 + (32, 32, 32, 24)),
}


def _real(model: str, what: str, tp: int, dtype: str = "bfloat16") -> Case:
    num_rows, segments = (_FRAMES | _WINDOWS)[what]
    return Case(
        num_rows=num_rows,
        num_heads=NUM_HEADS,
        width=WIDTHS[model],
        segments=segments,
        dtype=dtype,
        tp=tp,
    )


_ALL = [("qwen3_vl_8b", what, 1) for what in _FRAMES]
_ALL += [("qwen2_5_vl_7b", what, 1) for what in _WINDOWS]
_ALL += [(model, "tower_4096", tp) for model in WIDTHS for tp in (1, 4, 8)]
_ALL += [("qwen2_5_vl_7b", "windows_4096", tp) for tp in (4, 8)]
_ALL += [("qwen3_vl_8b", what, tp) for what in ("tower_16384", "frames_16384") for tp in (4, 8)]
_ALL += [(model, "images_4096", tp) for model in ("qwen3_vl_2b", "qwen3_vl_8b") for tp in (4, 8)]

REAL: dict[str, Case] = {f"{m}_{what}_tp{tp}": _real(m, what, tp) for m, what, tp in _ALL} | {
    "qwen3_vl_8b_tower_1024_float32_tp1": _real("qwen3_vl_8b", "tower_1024", 1, "float32"),
}
