"""Whole frames packed into tower calls of a few patch capacities, and the arrays of such a call."""

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
        capacity: patches of the program, valid ones and padding.
        frames: in order; their patches fit the capacity.
    """

    capacity: int
    frames: tuple[FramePlan, ...]

    @property
    def num_patches(self) -> int:
        """Valid patches; those behind are padding."""
        return sum(frame.num_patches for frame in self.frames)


def pack_frames(frames: Sequence[FramePlan], capacities: tuple[int, ...]) -> list[PackedCall]:
    """Packs frames, in order, into calls of at most the largest capacity.

    Args:
        frames: in the order in which they are wanted.
        capacities: patches of each tower program, ascending.

    Returns:
        Calls in order, each of the smallest capacity that holds it.

    Raises:
        MediaTooLargeError: a frame is larger than the largest capacity.
    """
    groups: list[list[FramePlan]] = []
    room = 0
    for frame in frames:
        if frame.num_patches > capacities[-1]:
            raise MediaTooLargeError(
                f"a frame of {frame.num_patches} patches ({frame.grid_h} x {frame.grid_w}) is over "
                f"the largest patch capacity {capacities[-1]}; send it smaller or lower max_pixels"
            )
        if frame.num_patches > room:
            groups.append([])
            room = capacities[-1]
        groups[-1].append(frame)
        room -= frame.num_patches
    return [_call(tuple(group), capacities) for group in groups]


def _call(frames: tuple[FramePlan, ...], capacities: tuple[int, ...]) -> PackedCall:
    total = sum(frame.num_patches for frame in frames)
    capacity = next(capacity for capacity in capacities if capacity >= total)
    return PackedCall(capacity=capacity, frames=frames)


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
        one segment of its own behind the valid patches.

    Raises:
        ValueError: patches or rows of a frame do not have its size.
    """
    num_patches, capacity, cell = call.num_patches, call.capacity, merge_size**2
    width = patches[0].shape[1]
    arrays = {
        "patches_PW": np.zeros((capacity, width), np.uint8),
        "coords_2P": np.zeros((2, capacity), np.int32),
        "interp_index_4P": np.zeros((4, capacity), np.int32),
        "interp_weight_4P": np.zeros((4, capacity), np.float32),
        "bounds_2P": np.empty((2, capacity), np.int32),
        "rows_M": np.full(capacity // cell, -1, np.int32),
        "num_patches": np.array(num_patches, np.int32),
        "layers_2": np.array(layers, np.int32),
    }
    start = 0
    for frame, frame_patches, frame_rows in zip(call.frames, patches, rows, strict=True):
        count, end = frame.num_patches, start + frame.num_patches
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
        arrays["bounds_2P"][:, start:end] = [[start], [end]]
        arrays["rows_M"][start // cell : end // cell] = frame_rows
        start = end
    arrays["bounds_2P"][:, num_patches:] = [[num_patches], [capacity]]
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
