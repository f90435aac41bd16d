"""The static side of the paged attention kernel: sizes that its parts share."""

from dataclasses import dataclass
from typing import Any

from jax import lax

from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.paged_attention.blocks import SUBLANES, Blocks
from tpu_vl.kernels.paged_attention.words import packing


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one call on one device; hashable.

    Args:
        num_kv_heads: K.
        group: query heads per K/V head, padded (see `padded_group`).
        num_parts: 128-lane parts of a head; the rows of each lie apart.
        page_size: S.
        num_rows: C, rows of one slot, each 128 lanes.
        max_pages: M.
        dtype: of q and the output.
        cache_dtype: of the pages.
        scale: factor of the logits.
        quantised: the pages have scales.
        blocks: sizes of tiles and blocks.
        vmem_bytes: that the kernel may take.
        interpreted: run by JAX's interpreter.
    """

    num_kv_heads: int
    group: int
    num_parts: int
    page_size: int
    num_rows: int
    max_pages: int
    dtype: Any
    cache_dtype: Any
    scale: float
    quantised: bool
    blocks: Blocks
    vmem_bytes: int
    interpreted: bool

    @property
    def part_rows(self) -> int:
        """Query rows of one part of all heads: whole registers."""
        return round_up(self.num_kv_heads * self.group, SUBLANES)

    @property
    def query_rows(self) -> int:
        """Query rows of one token."""
        return self.num_parts * self.part_rows

    @property
    def width(self) -> int:
        """H, padded to lanes."""
        return self.num_parts * NUM_LANES

    @property
    def decode_rows(self) -> int:
        """Query rows that share registers in decoding: those of one head, or of several."""
        return max(self.group, SUBLANES)


def padded_group(group: int, dtype: Any) -> int:
    """Query heads per K/V head as the kernel lays them out: a power of two that fills words."""
    size = packing(dtype)
    while size < group:
        size *= 2
    return size


def quotient(value: Any, divisor: int) -> Any:
    """`value // divisor` of non-negative int32 values; a shift where it can be.

    Not `//`: its treatment of signs asks the running device for its kind.
    """
    if isinstance(value, int):
        return value // divisor
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1)
    return lax.div(value, divisor)


def ceil_quotient(value: Any, divisor: int) -> Any:
    """`value / divisor` of a non-negative int32 scalar, rounded up."""
    return quotient(value + (divisor - 1), divisor)
