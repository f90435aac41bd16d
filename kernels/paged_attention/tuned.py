"""Block sizes of paged_attention, written by bench/tune_blocks.py: shape to fields of Blocks."""

TABLE: dict[tuple[str | int, ...], tuple[int, ...]] = {
    ("v6e", 32, 8, 128, 64, "bfloat16"): (256, 1024, 512, 4),
    ("v6e", 32, 8, 128, 64, "int8"): (512, 1024, 1024, 4),
}
