"""Block sizes of vision_attention, written by bench/tune_blocks.py: shape to fields of Blocks."""

TABLE: dict[tuple[str | int, ...], tuple[int, ...]] = {}
