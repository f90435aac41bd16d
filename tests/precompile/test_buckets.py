"""The ladders of capacities: what they cover, what they are multiples of, what they waste."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import ConfigError, TpuVlError
from tpu_vl.precompile import buckets, traffic
from tpu_vl.vision.options import ImageOptions, VideoOptions
from tpu_vl.vision.pack import FramePlan, computed_rows, pack_frames
from tpu_vl.vision.resize import plan_image, plan_video

PROCESSOR = ProcessorConfig()
ATTENTION_PATCHES = 4_294  # of the 8B tower on one v6e
FRAME_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768)


def served_plan(top: int = 65_536, num_shards: int = 4, num_bins: int = 1) -> buckets.PatchPlan:
    return buckets.patch_plan(top, 1_024, num_shards, 2, num_bins=num_bins, row_steps=4)


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
    st.integers(1, 65_536),
    st.sampled_from([64, 256, 1024]),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.booleans(),
)
def test_capacities_split_over_devices_and_bins(
    frame: int, block: int, shards: int, data: bool
) -> None:
    bins = shards if data else 1
    plan = buckets.patch_plan(frame, block, shards, 2, num_bins=bins, row_steps=4)
    assert plan.max_frame_patches >= frame
    assert list(plan.capacities) == sorted(set(plan.capacities))
    smallest_call = 0
    for capacity, steps in zip(plan.capacities, plan.row_steps, strict=True):
        assert capacity % (shards * 4) == 0, "merge groups whole on every device"
        assert capacity // bins % block == 0, "whole blocks in every bin"
        assert block // steps % 4 == 0, "merge groups whole in a block's part"
        assert steps == 4 or block // steps <= smallest_call / 16, "padding is a sixteenth at most"
        assert steps == 1 or 2 * block // steps > smallest_call / 16, "no code for less than that"
        smallest_call = capacity // bins


def test_four_capacities_cover_the_largest_frame() -> None:
    assert served_plan().capacities == (1_024, 4_096, 16_384, 65_536)
    assert served_plan().row_steps == (4, 4, 4, 1)
    assert served_plan(num_bins=4).capacities == (4_096, 16_384, 65_536, 262_144)


def test_the_largest_capacity_follows_the_limits_of_what_is_served() -> None:
    assert buckets.largest_frame(PROCESSOR, ("image", "video")) == 65_536
    assert buckets.largest_frame(PROCESSOR, ("video",)) == 49_152
    small = ProcessorConfig(image_max_pixels=256 * 32 * 32)
    assert buckets.largest_frame(small, ("image",)) <= 1_024
    assert served_plan(buckets.largest_frame(small, ("image",))).capacities == (1_024,)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 20_000),
    st.floats(1 / 199, 199),
    st.integers(10, 24),
    st.integers(0, 4),
    st.sampled_from(FRAME_COUNTS),
)
def test_no_picture_and_no_frame_is_larger_than_the_largest_frame(
    height: int, ratio: float, log_max: int, log_less: int, num_frames: int
) -> None:
    width = max(1, round(height * ratio))
    if max(height, width) > 200 * min(height, width):
        return
    high, low = 2**log_max, 2 ** (log_max - log_less)
    cfg = ProcessorConfig(
        image_min_pixels=low, image_max_pixels=high, video_min_pixels=low, video_max_pixels=high
    )
    limits = MediaLimits(max_frame_patches=1 << 40, max_request_patches=1 << 40)
    size = (height, width, cfg, limits)
    image = plan_image(*size, ImageOptions.parse({}, cfg, param="p"), param="p")
    video = plan_video(num_frames, *size, VideoOptions.parse({}, cfg, param="p"), param="p")
    for plan, kind in ((image, "image"), (video, "video")):
        frame = plan.grid_thw[1] * plan.grid_thw[2]
        assert frame <= buckets.largest_frame(cfg, (kind,))


def random_grid(rng: random.Random, limits: MediaLimits) -> tuple[int, int, int] | None:
    """The grid of a random picture or video as the processor makes it; None: it is refused."""
    height = round(10 ** rng.uniform(0, 4.2))
    width = max(1, round(height * 10 ** rng.uniform(-1, 1)))
    size = (height, width, PROCESSOR, limits)
    low = 10 ** rng.uniform(3, 6)
    raw = rng.choice(({}, {"min_pixels": low // 1, "max_pixels": low * rng.uniform(1, 20) // 1}))
    try:
        if rng.random() < 0.5:
            return plan_image(
                *size, ImageOptions.parse(raw, PROCESSOR, param="p"), param="p"
            ).grid_thw
        options = VideoOptions.parse(raw, PROCESSOR, param="p")
        return plan_video(rng.choice(FRAME_COUNTS), *size, options, param="p").grid_thw
    except TpuVlError:
        return None


@pytest.mark.parametrize("num_bins", [1, 4])
def test_every_grid_of_the_processor_maps_to_listed_calls(num_bins: int) -> None:
    rng, plan = random.Random(num_bins), served_plan(num_bins=num_bins)
    limits = MediaLimits(max_frame_patches=plan.max_frame_patches)
    seen = set()
    grids = (g for g in iter(lambda: random_grid(rng, limits), ()) if g is not None)
    for trial, (t, h, w) in enumerate(itertools.islice(grids, 50_000)):
        assert h % 2 == w % 2 == 0
        calls = buckets.calls_of((t, h, w), plan)
        assert sum(frames for _, frames in calls) == t
        for capacity, frames in calls:
            assert capacity in plan.capacities
            assert -(-frames // num_bins) * h * w <= capacity // num_bins
        seen.update(c for c, _ in calls)
        if trial % 500 == 0:  # the arithmetic is that of the packer
            packed = pack_frames(
                [FramePlan(key=i, grid_h=h, grid_w=w) for i in range(t)], plan.capacities, num_bins
            )
            assert [(c.capacity, len(c.frames)) for c in packed] == calls
    assert seen == set(plan.capacities), "every listed program is used"


def test_a_frame_over_the_largest_capacity_has_no_call() -> None:
    with pytest.raises(ConfigError, match=r"65540 patches .* 65536"):
        buckets.calls_of((1, 2, 32_770), served_plan())


def test_computed_rows_are_whole_blocks_and_a_part_of_the_last() -> None:
    def rows(*counts: int, num_bins: int = 1, steps: int = 4) -> int:
        frames = [FramePlan(key=i, grid_h=2, grid_w=n // 2) for i, n in enumerate(counts)]
        (call,) = pack_frames(frames, (65_536,), num_bins)
        return computed_rows(call, 1_024, steps)

    assert rows(256) == 256
    assert rows(260) == 512
    assert rows(1_024, 400) == 1_024 + 512
    assert rows(260, steps=8) == 384
    assert rows(260, steps=1) == 1_024
    assert rows(1_024, 260, 260, num_bins=2) == 1_024 + 768


@pytest.mark.parametrize("name", ["mixed", "small pictures"])
@pytest.mark.parametrize("shards", [1, 4, 8])
def test_padding_is_an_eighth_at_most(name: str, shards: int) -> None:
    plan = served_plan(num_shards=shards)
    share = buckets.padding_share(traffic.DISTRIBUTIONS[name], plan, PROCESSOR, ATTENTION_PATCHES)
    assert 0 < share.linear <= share.all < 0.125


def test_padding_counts_blocks_not_capacities() -> None:
    one = [traffic.Sent("image", 640, 480, 1)]  # 1200 patches
    for steps, rows in ((1, 2_048), (4, 1_280)):
        plan = buckets.patch_plan(65_536, 1_024, 1, 2, row_steps=steps)
        share = buckets.padding_share(one, plan, PROCESSOR, ATTENTION_PATCHES)
        assert math.isclose(share.linear, 1 - 1_200 / rows)
        # Five blocks of 256 queries visit five of keys.
        assert math.isclose(share.attention, 1 - 1_200**2 / (5 * 256) ** 2)


def test_pictures_together_waste_less() -> None:
    shares = [
        buckets.padding_share(
            traffic.SMALL, served_plan(), PROCESSOR, ATTENTION_PATCHES, together
        ).linear
        for together in (1, 4)
    ]
    assert shares[1] < shares[0]


def test_attention_visits_only_blocks_that_hold_its_frames() -> None:
    def visits(*counts: int) -> int:
        frames = [FramePlan(key=i, grid_h=2, grid_w=n // 2) for i, n in enumerate(counts)]
        (call,) = pack_frames(frames, (65_536,))
        return buckets._visited_pairs(call) // buckets.ATTENTION_BLOCK**2

    assert visits(256, 256, 256) == 3
    assert visits(512) == 4
    assert visits(200, 200) == 4  # two blocks, the second frame in both
    assert visits(300, 300) == 2 + 3 + 2  # [0,256): frame 0; [256,512): both; the rest: frame 1


def test_small_pictures_are_of_64_to_256_tokens() -> None:
    for sent in traffic.SMALL:
        _, h, w = buckets.grid_of(sent, PROCESSOR, 65_536)
        assert 64 <= h * w // 4 <= 256, sent
    kinds = {s.kind for s in traffic.MIXED}
    assert kinds == {"image", "video"}
    assert all(s.weight > 0 for s in itertools.chain(*traffic.DISTRIBUTIONS.values()))
