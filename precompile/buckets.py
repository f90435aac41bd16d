"""Every shape that can occur on the device, and why: capacities follow from the limits alone.

* `text/{T}`: packed tokens. Decoding wants small ones, since a step of few sequences reads the same
  weights but computes T rows; prefill wants few programs.
* `sample/{R}`: the sequences that a text program of capacity T can hold.
* `encode/{P}`: packed patches. Work inside is bounded by data, so a capacity costs code and the
  transfer of its patches, not time: steps of four up to the largest frame that can be sent.

Any grid that the processor makes maps to calls of these (`calls_of`): frames are never split, so
the largest capacity must hold the largest frame, and nothing larger is needed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import ConfigError
from tpu_vl.precompile.traffic import Sent
from tpu_vl.vision.options import ImageOptions, VideoOptions
from tpu_vl.vision.pack import FramePlan, PackedCall, computed_rows, pack_frames
from tpu_vl.vision.resize import MAX_ASPECT_RATIO, plan_image, plan_video

# Work inside a program is bounded by data, so a capacity costs code, not time: steps of four keep
# the list short, and the smallest ones serve what is latency-bound.
_STEP = 4

# Rows of a last block that are padding, beside the patches of a capacity's smallest call, where
# more sizes of the last block are not worth their code.
_SMALL_PADDING = 1 / 16

ATTENTION_BLOCK = 256
"""Patches per block of queries and of keys by which the padding of attention is counted."""


@dataclass(frozen=True)
class PatchPlan:
    """The tower's shapes.

    Args:
        capacities: patches of each tower program over all bins, ascending.
        row_block: patches per block of the linear parts; divides every bin's share.
        row_steps: of each capacity, the sizes that a call's last block may take: even steps up to
            `row_block`. Each size is code in the program: a capacity whose calls all have many
            blocks has fewer.
        num_bins: bins of every call.
    """

    capacities: tuple[int, ...]
    row_block: int
    row_steps: tuple[int, ...]
    num_bins: int

    @property
    def max_frame_patches(self) -> int:
        """Patches of the largest frame."""
        return self.capacities[-1] // self.num_bins


def token_capacities(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    """Text capacities: a ladder for decode up to `max_num_seqs`, then prefill steps of four.

    Args:
        max_num_batched_tokens: the largest capacity, >= max_num_seqs.
        max_num_seqs: decode rows of a full step, >= 1.

    Returns:
        Ascending capacities: a decode-only step of n rows runs in the smallest that holds n,
        a step with prefill in the smallest that holds its tokens.
    """
    ladder = {max_num_batched_tokens, max_num_seqs}
    size = max_num_seqs
    while size > _STEP:
        size = max(_STEP, size // _STEP)
        ladder.add(size)
    size = max_num_seqs * _STEP
    while size < max_num_batched_tokens:
        ladder.add(size)
        size *= _STEP
    return tuple(sorted(s for s in ladder if s <= max_num_batched_tokens))


def largest_frame(processor: ProcessorConfig, modalities: tuple[str, ...]) -> int:
    """Patches that no picture and no video frame exceeds under a processor's bounds.

    Beside the upper bound itself, two roundings count: a side is at least one cell, and media
    below the lower bound are scaled up to whole cells.

    Args:
        processor: pixel bounds under the operator's flags.
        modalities: served media.
    """
    temporal = processor.temporal_patch_size
    bounds = {
        "image": (processor.image_min_pixels, processor.image_max_pixels),
        "video": (processor.video_min_pixels // temporal, processor.video_max_pixels // temporal),
    }
    return max(_largest(*bounds[m], processor.factor) for m in modalities) // (
        processor.patch_size**2
    )


def _largest(min_pixels: int, max_pixels: int, factor: int) -> int:
    thin = (MAX_ASPECT_RATIO + 1) * factor**2
    ratio = math.sqrt(MAX_ASPECT_RATIO)
    sides = math.sqrt(min_pixels) * (ratio + 1 / ratio)
    scaled_up = min_pixels + factor * sides + factor**2
    return max(max_pixels, thin, math.ceil(scaled_up))


def patch_plan(
    max_frame_patches: int,
    row_block: int,
    num_shards: int,
    merge_size: int,
    *,
    num_bins: int = 1,
    row_steps: int = 1,
) -> PatchPlan:
    """Tower capacities: from one row block in steps of four up to the largest frame.

    Args:
        max_frame_patches: patches of the largest frame that is accepted.
        row_block: patches per block.
        num_shards: size of the mesh axis "model".
        merge_size: patches per side of a merged cell.
        num_bins: 1, or `num_shards` where every device encodes frames of its own.
        row_steps: sizes of the last block at the most, a power of two.

    Returns:
        Capacities whose shares of a device and of a bin are whole merge groups, and of a bin
        whole row blocks.
    """
    unit = math.lcm(num_shards // num_bins * merge_size**2, row_block)
    top = -(-max_frame_patches // unit) * unit
    sizes = [unit]
    while sizes[-1] * _STEP < top:
        sizes.append(sizes[-1] * _STEP)
    if sizes[-1] < top:
        sizes.append(top)
    return PatchPlan(
        capacities=tuple(size * num_bins for size in sizes),
        row_block=row_block,
        row_steps=tuple(
            _steps_after(previous, row_block, row_steps) for previous in (0, *sizes[:-1])
        ),
        num_bins=num_bins,
    )


def _steps_after(previous: int, row_block: int, most: int) -> int:
    """Sizes of the last block in a capacity whose calls all have more than `previous` patches."""
    steps = 1
    while steps < most and row_block // steps > previous * _SMALL_PADDING:
        steps *= 2
    return steps


def calls_of(grid_thw: tuple[int, int, int], plan: PatchPlan) -> list[tuple[int, int]]:
    """The packed calls of one medium alone, by arithmetic: (capacity, frames of the call).

    Args:
        grid_thw: temporal groups, rows and columns of patches.
        plan: the tower's shapes.

    Raises:
        ConfigError: a frame is larger than the largest capacity: the limits let none through.
    """
    num_frames, size = grid_thw[0], grid_thw[1] * grid_thw[2]
    per_bin = plan.max_frame_patches // size
    if per_bin == 0:
        raise ConfigError(
            f"a frame of {size} patches is over the largest capacity {plan.max_frame_patches}: "
            "raise --max-frame-patches"
        )
    calls = []
    while num_frames:
        frames = min(num_frames, per_bin * plan.num_bins)
        fullest = -(-frames // plan.num_bins) * size
        calls.append((next(c for c in plan.capacities if c // plan.num_bins >= fullest), frames))
        num_frames -= frames
    return calls


@dataclass(frozen=True)
class PaddingShare:
    """Shares of what the tower computes that are padding, means over a distribution.

    Args:
        linear: of the rows of the linear parts.
        attention: of the pairs of query and key in the blocks that attention visits; those of
            other frames in the same block count as padding.
        all: of the operations of both.
    """

    linear: float
    attention: float
    all: float


def padding_share(
    sent: Iterable[Sent],
    plan: PatchPlan,
    processor: ProcessorConfig,
    attention_patches: int,
    together: int = 1,
) -> PaddingShare:
    """Padding in computed blocks, every medium (or `together` equal ones) encoded alone.

    Args:
        sent: the distribution; each medium's share counts by its weight.
        plan: the tower's shapes.
        processor: sizes media.
        attention_patches: size of the frame whose attention takes as long as all else.
        together: equal media that the tower packs into a call.
    """
    total, sums = 0.0, [0.0, 0.0, 0.0]
    for one in sent:
        t, h, w = grid_of(one, processor, plan.max_frame_patches)
        frames = [FramePlan(key=i, grid_h=h, grid_w=w) for i in range(t * together)]
        calls = pack_frames(frames, plan.capacities, plan.num_bins)
        rows = sum(call.num_patches for call in calls)
        pairs = sum(f.num_patches**2 for f in frames)
        done = sum(plan_rows(call, plan) for call in calls)
        visited = sum(_visited_pairs(call) for call in calls)
        shares = (
            1 - rows / done,
            1 - pairs / visited,
            1 - (rows + pairs / attention_patches) / (done + visited / attention_patches),
        )
        total += one.weight
        sums = [s + one.weight * share for s, share in zip(sums, shares, strict=True)]
    return PaddingShare(*(s / total for s in sums))


def plan_rows(call: PackedCall, plan: PatchPlan) -> int:
    """Rows that the linear parts compute for a call."""
    steps = plan.row_steps[plan.capacities.index(call.capacity)]
    return computed_rows(call, plan.row_block, steps)


def _visited_pairs(call: PackedCall) -> int:
    """Pairs in the blocks of keys that each block of queries visits: those its frames touch."""
    total = 0
    for number in range(call.num_bins):
        starts = [0]
        for frame, own in zip(call.frames, call.bins, strict=True):
            if own == number:
                starts.append(starts[-1] + frame.num_patches)
        frame = 0
        for block in range(0, starts[-1], ATTENTION_BLOCK):
            while starts[frame + 1] <= block:
                frame += 1
            last = frame
            while starts[last + 1] < min(block + ATTENTION_BLOCK, starts[-1]):
                last += 1
            first_key = starts[frame] // ATTENTION_BLOCK
            end_key = -(-starts[last + 1] // ATTENTION_BLOCK)
            total += (end_key - first_key) * ATTENTION_BLOCK**2
    return total


def grid_of(sent: Sent, processor: ProcessorConfig, max_frame_patches: int) -> tuple[int, int, int]:
    limits = MediaLimits(max_frame_patches=max_frame_patches, max_request_patches=1 << 40)
    size = (sent.height, sent.width, processor, limits)
    if sent.kind == "image":
        options = ImageOptions.parse({}, processor, param="traffic")
        return plan_image(*size, options, param="traffic").grid_thw
    options = VideoOptions.parse({}, processor, param="traffic")
    return plan_video(sent.num_frames, *size, options, param="traffic").grid_thw
