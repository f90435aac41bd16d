"""Every shape that can occur on the device, and why: capacities follow from the limits alone."""

import math
from dataclasses import dataclass

# Work inside a program is bounded by data, so a capacity costs code, not time: steps of four keep
# the list short, and the smallest ones serve what is latency-bound.
_STEP = 4


@dataclass(frozen=True)
class PatchPlan:
    """The tower's shapes.

    Args:
        capacities: patches of each tower program, ascending.
        row_block: patches per block of the linear parts; divides every capacity.
    """

    capacities: tuple[int, ...]
    row_block: int


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


def patch_plan(
    max_frame_patches: int, row_block: int, tensor_parallel_size: int, merge_size: int
) -> PatchPlan:
    """Tower capacities: from one row block in steps of four up to the largest frame.

    Args:
        max_frame_patches: patches of the largest frame that is accepted.
        row_block: wanted patches per block; rounded up to lcm(tp, 1) * merge_size ** 2.
        tensor_parallel_size: size of the mesh axis "model".
        merge_size: patches per side of a merged cell.

    Returns:
        Capacities that are multiples of lcm(tp * merge ** 2, block), so that a patch array splits
        over "model" with merge groups whole on every device.
    """
    unit = math.lcm(tensor_parallel_size * merge_size**2, row_block)
    top = -(-max_frame_patches // unit) * unit
    capacities = [unit]
    while capacities[-1] * _STEP < top:
        capacities.append(capacities[-1] * _STEP)
    if capacities[-1] < top:
        capacities.append(top)
    return PatchPlan(tuple(capacities), row_block)
