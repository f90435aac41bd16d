"""Whole frames packed into tower calls of a few patch capacities, and the arrays of such a call.

A call has one bin, or one for each device that encodes frames of its own: then the patches of a
bin lie together, and the capacity is that of all bins.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tpu_vl.errors import MediaTooLargeError
from tpu_vl.vision.positions import interpolation_tables, patch_coords

_CACHED_GRIDS = 32


@dataclass(frozen=True, kw_only=True)
class FramePlan:
    """One temporal group of one medium: the unit that is packed and never split.

    Args:
        key: names the frame for the caller, for example (media digest, group).
        grid_h, grid_w: in patches.
    """

    key: Hashable
    grid_h: int
    grid_w: int

    @property
    def num_patches(self) -> int:
        """Patches of the frame."""
        return self.grid_h * self.grid_w


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """Frames that one tower call encodes.

    Args:
        capacity: patches of the program, valid ones and padding, over all bins.
        frames: in order.
        bins: of each frame.
        num_bins: X; the patches of each bin fit capacity / X.
    """

    capacity: int
    frames: tuple[FramePlan, ...]
    bins: tuple[int, ...]
    num_bins: int

    @property
    def num_patches(self) -> int:
        """Valid patches; those behind are padding."""
        return sum(frame.num_patches for frame in self.frames)

    @property
    def patches_of_bins(self) -> tuple[int, ...]:
        """Valid patches of each bin."""
        sums = [0] * self.num_bins
        for frame, number in zip(self.frames, self.bins, strict=True):
            sums[number] += frame.num_patches
        return tuple(sums)


def pack_frames(
    frames: Sequence[FramePlan], capacities: tuple[int, ...], num_bins: int = 1
) -> list[PackedCall]:
    """Packs frames, in order, into calls of at most the largest capacity.

    Each frame goes to the emptiest bin; the first that does not fit there opens the next call.

    Args:
        frames: in the order in which they are wanted.
        capacities: patches of each tower program, ascending; multiples of `num_bins`.
        num_bins: X, bins of every call.

    Returns:
        Calls in order, each of the smallest capacity that holds it.

    Raises:
        MediaTooLargeError: a frame is larger than a bin of the largest capacity.
    """
    calls: list[PackedCall] = []
    room = capacities[-1] // num_bins
    group: list[FramePlan] = []
    bins: list[int] = []
    filled = [0] * num_bins
    for frame in frames:
        if frame.num_patches > room:
            raise MediaTooLargeError(
                f"a frame of {frame.num_patches} patches ({frame.grid_h} x {frame.grid_w}) is over "
                f"the largest patch capacity {room}; send it smaller or lower max_pixels"
            )
        emptiest = filled.index(min(filled))
        if filled[emptiest] + frame.num_patches > room:
            calls.append(_call(group, bins, filled, capacities))
            group, bins, filled, emptiest = [], [], [0] * num_bins, 0
        group.append(frame)
        bins.append(emptiest)
        filled[emptiest] += frame.num_patches
    return [*calls, _call(group, bins, filled, capacities)] if group else calls


def _call(
    frames: list[FramePlan], bins: list[int], filled: list[int], capacities: tuple[int, ...]
) -> PackedCall:
    num_bins = len(filled)
    capacity = next(c for c in capacities if c // num_bins >= max(filled))
    return PackedCall(capacity=capacity, frames=tuple(frames), bins=tuple(bins), num_bins=num_bins)


def computed_rows(call: PackedCall, row_block: int, row_steps: int) -> int:
    """Rows that the linear parts compute for a call, over all bins: whole blocks, then a part.

    Args:
        call: the frames.
        row_block: patches per block.
        row_steps: sizes of the last block, in even steps up to `row_block`.
    """
    step = row_block // row_steps
    return sum(-(-count // step) * step for count in call.patches_of_bins)


def layer_cost(call: PackedCall, attention_patches: int) -> float:
    """What one tower layer costs the busiest device, in patches of linear work.

    Args:
        call: the frames.
        attention_patches: size of the frame whose attention takes as long as all else.
    """
    costs = [0.0] * call.num_bins
    for frame, number in zip(call.frames, call.bins, strict=True):
        costs[number] += frame.num_patches * (1 + frame.num_patches / attention_patches)
    return max(costs)


def fill_call(
    call: PackedCall,
    patches: Sequence[np.ndarray],
    rows: Sequence[np.ndarray],
    *,
    side: int,
    merge_size: int,
    layers: tuple[int, int],
) -> dict[str, np.ndarray]:
    """Builds the arrays of a packed call: the fields of `models.family.EncodeInputs`, by name.

    Args:
        call: the frames.
        patches: per frame, uint8 [h * w, W].
        rows: per frame, int32 pool row of each merged cell [h * w / merge_size ** 2].
        side: cells per side of the learned position table.
        merge_size: patches per side of a merged cell.
        layers: first tower layer to run and one past the last.

    Returns:
        Field name -> array. Padding has zero patches, coordinates and weights, rows -1, and is
        one segment of its own behind the valid patches of its bin.

    Raises:
        ValueError: patches or rows of a frame do not have its size.
    """
    capacity, cell, width = call.capacity, merge_size**2, patches[0].shape[1]
    arrays = {
        "patches_PW": np.zeros((capacity, width), np.uint8),
        "coords_2P": np.zeros((2, capacity), np.int32),
        "interp_index_4P": np.zeros((4, capacity), np.int32),
        "interp_weight_4P": np.zeros((4, capacity), np.float32),
        "bounds_2P": np.empty((2, capacity), np.int32),
        "rows_M": np.full(capacity // cell, -1, np.int32),
        "num_patches_X": np.array(call.patches_of_bins, np.int32),
        "layers_2": np.array(layers, np.int32),
    }
    per_bin = capacity // call.num_bins
    ends = [number * per_bin for number in range(call.num_bins)]
    for frame, number, frame_patches, frame_rows in zip(
        call.frames, call.bins, patches, rows, strict=True
    ):
        count, start = frame.num_patches, ends[number]
        end = ends[number] = start + count
        if frame_patches.shape != (count, width) or frame_rows.shape != (count // cell,):
            raise ValueError(
                f"frame {frame.key!r} of {count} patches got patches {frame_patches.shape} and "
                f"rows {frame_rows.shape}"
            )
        coords_2P, index_4P, weight_4P = frame_tables(frame.grid_h, frame.grid_w, side, merge_size)
        arrays["patches_PW"][start:end] = frame_patches
        arrays["coords_2P"][:, start:end] = coords_2P
        arrays["interp_index_4P"][:, start:end] = index_4P
        arrays["interp_weight_4P"][:, start:end] = weight_4P
        first = number * per_bin
        arrays["bounds_2P"][:, start:end] = [[start - first], [end - first]]
        arrays["rows_M"][start // cell : end // cell] = frame_rows
    for number, end in enumerate(ends):
        first, last = number * per_bin, (number + 1) * per_bin
        arrays["bounds_2P"][:, end:last] = [[end - first], [per_bin]]
    return arrays


@lru_cache(maxsize=_CACHED_GRIDS)
def frame_tables(
    grid_h: int, grid_w: int, side: int, merge_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates [2, P], interpolation indices and weights [4, P] of a grid; read-only, cached.

    Args:
        grid_h, grid_w: in patches.
        side: cells per side of the learned position table.
        merge_size: patches per side of a merged cell.
    """
    tables = (
        patch_coords(grid_h, grid_w, merge_size),
        *interpolation_tables(grid_h, grid_w, side, merge_size),
    )
    for table in tables:
        table.flags.writeable = False
    return tables
