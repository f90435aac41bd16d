"""The ladders of capacities: what they cover, what they are multiples of, how many there are."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tpu_vl.precompile import buckets


@given(st.integers(1, 512), st.integers(0, 16_384))
def test_token_ladder_holds_decode_and_prefill(num_seqs: int, more: int) -> None:
    top = num_seqs + more
    ladder = buckets.token_capacities(top, num_seqs)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[-1] == top
    assert num_seqs in ladder
    assert len(ladder) <= 12


def test_single_stream_decode_is_not_padded_to_a_full_batch() -> None:
    assert buckets.token_capacities(2048, 256)[0] == 4


@given(
    st.integers(1, 65_536), st.sampled_from([64, 256, 1024]), st.sampled_from([1, 2, 3, 4, 6, 8])
)
def test_patch_capacities_split_over_the_mesh(frame: int, block: int, tp: int) -> None:
    plan = buckets.patch_plan(frame, block, tp, 2)
    assert plan.capacities[-1] >= frame
    for capacity in plan.capacities:
        assert capacity % math.lcm(tp * 4, plan.row_block) == 0
        assert capacity % (math.lcm(tp, 4)) == 0


def test_four_capacities_cover_the_largest_frame() -> None:
    plan = buckets.patch_plan(65_536, 1_024, 4, 2)
    assert plan.capacities == (1_024, 4_096, 16_384, 65_536)
