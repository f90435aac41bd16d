"""Block sizes of paged_attention, written by bench/tune_blocks.py: shape to fields of Blocks."""

TABLE: dict[tuple[str | int, ...], tuple[int, ...]] = {
    ("v6e", 8, 2, 128, 64, "int8"): (4096, 1024, 1024, 4),
    ("v6e", 32, 8, 128, 64, "bfloat16"): (256, 512, 512, 4),
    ("v6e", 32, 8, 128, 64, "int8"): (2048, 1024, 1024, 4),
}
