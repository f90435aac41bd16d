"""The arithmetic that tuning counts the tower's blocks with agrees with the interpreter."""

import pytest

from bench import own, tower_visits
from tpu_vl.kernels.vision_attention.blocks import Blocks
from tpu_vl.kernels.vision_attention.cases import Case

WHOLE = Blocks(queries=512, keys=256, tile=128, heads=2, chunk=1536)
CHUNKED = Blocks(queries=256, keys=256, tile=128, heads=1, chunk=512)
WIDE = Blocks(queries=256, keys=512, tile=256, heads=2, chunk=1536)
SEGMENTS = {
    "one": (1536,),
    "images": (700, 30, 500),
    "windows": (64,) * 20,
    "edges": (512, 512, 256),
    "none": (),
}


@pytest.mark.parametrize("blocks", [WHOLE, CHUNKED, WIDE], ids=["whole", "chunked", "wide"])
def test_arithmetic_equals_what_the_interpreter_ran(blocks: Blocks) -> None:
    kinds = set()
    for segments in SEGMENTS.values():
        case = Case(num_rows=1536, num_heads=4, width=72, segments=segments, dtype="bfloat16")
        found = own.vision_counts(case, blocks)
        assert tower_visits.counts(case, blocks) == found, segments
        kinds |= {name for name, n in found.items() if n}
    assert {"step", "attempt", "full_block", "border_block"} <= kinds
    assert ("narrow_tiles" in kinds) == (blocks.queries > blocks.tile)
