"""Positions that the host computes: M-RoPE of a prompt, patch coordinates, interpolation tables."""

from collections.abc import Sequence

import numpy as np


def mrope_positions(
    num_tokens: int, frames: Sequence[tuple[int, int, int]], merge_size: int
) -> tuple[np.ndarray, int]:
    """Time, row and column position of every token of a prompt.

    Text advances all three alike; the tokens of a frame share one time and spread over rows and
    columns; what follows starts one past the larger side of the frame.

    Args:
        num_tokens: T, of the whole prompt.
        frames: (prompt index of its first token, grid_h, grid_w in patches) of every image and of
            every temporal group of every video, ascending.
        merge_size: patches per side of a merged cell.

    Returns:
        int32 positions [3, T], and the delta: answer token i is at position T + i + delta.

    Raises:
        ValueError: frames overlap or do not lie inside the prompt.

    Source: Qwen3VLModel.get_rope_index, transformers 5.24 models/qwen3_vl/modeling_qwen3_vl.py.
    """
    positions_3T = np.empty((3, num_tokens), np.int32)
    done = position = 0
    for start, grid_h, grid_w in frames:
        rows, columns = grid_h // merge_size, grid_w // merge_size
        end = start + rows * columns
        if start < done or end > num_tokens:
            raise ValueError(
                f"frame of {rows * columns} tokens at {start} overlaps the one before it, which "
                f"ends at {done}, or leaves the prompt of {num_tokens} tokens"
            )
        positions_3T[:, done:start] = np.arange(position, position + start - done)
        position += start - done
        positions_3T[0, start:end] = position
        positions_3T[1, start:end] = np.repeat(np.arange(rows), columns) + position
        positions_3T[2, start:end] = np.tile(np.arange(columns), rows) + position
        position += max(rows, columns)
        done = end
    positions_3T[:, done:] = np.arange(position, position + num_tokens - done)
    return positions_3T, position - done


def patch_coords(grid_h: int, grid_w: int, merge_size: int) -> np.ndarray:
    """Row and column of every patch of a frame, merge blocks contiguous.

    Args:
        grid_h, grid_w: in patches, multiples of `merge_size`.
        merge_size: patches per side of a merged cell.

    Returns:
        int32 [2, grid_h * grid_w].

    Source: get_vision_position_ids, transformers 5.24 vision_utils.py.
    """
    raster = np.indices((grid_h, grid_w), np.int32)
    blocks = raster.reshape(
        2, grid_h // merge_size, merge_size, grid_w // merge_size, merge_size
    ).transpose(0, 1, 3, 2, 4)
    return blocks.reshape(2, -1)


def interpolation_tables(
    grid_h: int, grid_w: int, side: int, merge_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where a frame's patches fall in the learned square table of positions: bilinear, corners met.

    Args:
        grid_h, grid_w, merge_size: as for `patch_coords`.
        side: cells per side of the table.

    Returns:
        int32 indices [4, P] into the flattened table and float32 weights [4, P].

    Source: get_vision_interpolation_indices_and_weights(mode="bilinear", align_corners=True),
    transformers 5.24 vision_utils.py; equal bit for bit.
    """
    coords_2P = patch_coords(grid_h, grid_w, merge_size)
    row_taps, row_weights = _axis_taps(coords_2P[0], grid_h, side)
    column_taps, column_weights = _axis_taps(coords_2P[1], grid_w, side)
    index_4P = (row_taps[:, None] * side + column_taps[None]).reshape(4, -1)
    weight_4P = (row_weights[:, None] * column_weights[None]).reshape(4, -1)
    return index_4P, weight_4P


def _axis_taps(coords_P: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    source_P = coords_P.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor_P = np.floor(source_P)
    offsets = np.arange(2, dtype=np.int32)[:, None]
    taps_2P = np.minimum(floor_P.astype(np.int32) + offsets, side - 1)
    distance_2P = np.abs(source_P - floor_P - offsets.astype(np.float32))
    return taps_2P, np.maximum(np.float32(1) - distance_2P, np.float32(0))
