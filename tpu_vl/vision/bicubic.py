"""The antialiased bicubic filter that torch applies to uint8 pictures, byte for byte.

Weights are whole numbers of 16 bits and the sums are rounded to bytes after each of the two passes.
All products and sums are exact in the float type that is picked, so their order does not matter
and a pass is a matrix product of a band: as fast as the library that numpy multiplies with.

Source: `upsample_bicubic2d` with antialias on uint8, ATen/native/cpu/UpSampleKernel.cpp of torch
2.13, which torchvision's `resize` calls.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_BAND_INPUTS = 128  # inputs per product, about: bands stay small and mostly not zero
_MIN_BAND_OUTPUTS = 8
_MAX_PRECISION = 22
_EXACT = 1 << 24  # float32 holds every whole number up to here


@dataclass(frozen=True)
class _Band:
    """Weights [outputs, inputs] of a run of outputs, whole numbers, and where both start."""

    first_in: int
    first_out: int
    weight_OI: np.ndarray


@dataclass(frozen=True)
class _Filter:
    """All bands of one pass; a sum is divided by 2 ** precision."""

    bands: tuple[_Band, ...]
    precision: int


def resize_uint8(rgb_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes a picture along its rows, then along its columns.

    Args:
        rgb_HWC: uint8.
        height, width: target in pixels, >= 1.

    Returns:
        uint8 [height, width, 3], C-contiguous.
    """
    across_WHC = _resize_first(rgb_HWC.swapaxes(0, 1), width)
    return np.ascontiguousarray(_resize_first(across_WHC.swapaxes(0, 1), height))


def _resize_first(pixels: np.ndarray, size: int) -> np.ndarray:
    """One pass, along the first axis."""
    if pixels.shape[0] == size:
        return pixels
    found = _filter(pixels.shape[0], size)
    dtype = found.bands[0].weight_OI.dtype
    flat_IX = np.ascontiguousarray(pixels).reshape(pixels.shape[0], -1)
    out_OX = np.empty((size, flat_IX.shape[1]), np.uint8)
    half, step = dtype.type(2.0 ** (found.precision - 1)), dtype.type(2.0**-found.precision)
    for band in found.bands:
        num_out, num_in = band.weight_OI.shape
        # Widened a band at a time: a whole frame in float32 would be four frames of memory.
        band_IX = flat_IX[band.first_in : band.first_in + num_in].astype(dtype)
        sum_OX = band.weight_OI @ band_IX
        sum_OX += half
        sum_OX *= step
        np.floor(sum_OX, out=sum_OX)
        out_OX[band.first_out : band.first_out + num_out] = np.clip(sum_OX, 0, 255, out=sum_OX)
    return out_OX.reshape(size, *pixels.shape[1:])


@lru_cache(maxsize=256)
def _filter(num_in: int, num_out: int) -> _Filter:
    rows = [_weights(num_in, num_out, i) for i in range(num_out)]
    precision = _precision(max(float(weight.max()) for _, weight in rows))
    scaled = [(first, weight * (1 << precision)) for first, weight in rows]
    whole = [(first, np.trunc(w + np.copysign(0.5, w))) for first, w in scaled]
    largest = 255 * max(float(np.abs(w).sum()) for _, w in whole) + (1 << precision)
    dtype = np.float32 if largest < _EXACT else np.float64
    bands = []
    num_outputs = max(_MIN_BAND_OUTPUTS, _BAND_INPUTS * num_out // num_in)
    for first_out in range(0, num_out, num_outputs):
        block = whole[first_out : first_out + num_outputs]
        first_in = min(first for first, _ in block)
        last_in = max(first + len(w) for first, w in block)
        weight_OI = np.zeros((len(block), last_in - first_in), dtype)
        for row, (first, w) in enumerate(block):
            weight_OI[row, first - first_in : first - first_in + len(w)] = w
        weight_OI.setflags(write=False)
        bands.append(_Band(first_in, first_out, weight_OI))
    return _Filter(tuple(bands), precision)


def _weights(num_in: int, num_out: int, index: int) -> tuple[int, np.ndarray]:
    """The first input that an output takes from, and the weights, which sum to 1."""
    scale = num_in / num_out
    stretch = max(scale, 1.0)
    centre, support = scale * (index + 0.5), 2.0 * stretch
    first = max(int(centre - support + 0.5), 0)
    count = min(int(centre + support + 0.5), num_in) - first
    x = np.abs((np.arange(count, dtype=np.float64) + first - centre + 0.5) / stretch)
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    weight = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return first, weight / weight.sum()


def _precision(largest: float) -> int:
    """Bits after the point that leave the largest weight within 16 bits."""
    for precision in range(_MAX_PRECISION):
        if int(0.5 + largest * (1 << (precision + 1))) >= 1 << 15:
            return precision
    return _MAX_PRECISION
