"""Named shapes of vision attention, shared by tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Args:
        num_rows: P, the capacity.
        num_heads: N.
        width: H.
        segments: patches of each frame; the rest of P is padding.
        dtype: of q, k and v.
    """

    num_rows: int
    num_heads: int
    width: int
    segments: tuple[int, ...]
    dtype: str = "float32"


SMALL: dict[str, Case] = {
    "one_full": Case(num_rows=64, num_heads=4, width=16, segments=(64,)),
    "one_padded": Case(num_rows=64, num_heads=4, width=16, segments=(36,)),
    "three_sizes": Case(num_rows=128, num_heads=3, width=24, segments=(16, 64, 20)),
    "across_blocks": Case(num_rows=600, num_heads=2, width=8, segments=(250, 12, 280)),
    "many_tiny": Case(num_rows=320, num_heads=2, width=8, segments=(4,) * 75),
    "one_patch": Case(num_rows=16, num_heads=2, width=8, segments=(1,)),
    "nothing": Case(num_rows=16, num_heads=2, width=8, segments=()),
    "bfloat16": Case(num_rows=128, num_heads=4, width=24, segments=(48, 60), dtype="bfloat16"),
}

QWEN3_VL_8B: dict[str, Case] = {
    f"qwen3_vl_8b_{rows}": Case(
        num_rows=rows, num_heads=16, width=72, segments=(rows,), dtype="bfloat16"
    )
    for rows in (1024, 4096, 16384)
}
