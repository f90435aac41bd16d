"""Block sizes of the TPU kernel: a table, a formula for other shapes, the VMEM they take."""

from dataclasses import dataclass, fields, replace

import jax.numpy as jnp

from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.chips import Chip
from tpu_vl.kernels.vision_attention.tuned import TABLE

_SUBLANES = 8  # rows of 32 bits of a vector register
_VMEM_SHARE = 0.75  # of the chip's; the rest is for what XLA keeps there around the kernel
_HEADS_BYTES = 32  # bytes of one value of each head of a step: more compile for minutes
_MIN_CHUNK = 4096  # keys: fewer at a time would cost more steps than another head is worth


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How one grid step cuts the work; all but `heads` are multiples of 128 patches.

    Args:
        queries: of a block.
        keys: of a key block of the wide path; divides `queries` or is a multiple of it.
        tile: keys of one product, and queries of a group of the narrow path; divides `queries`
            and `keys`. Where it equals `queries` there is no narrow path.
        heads: computed together in a step; divides the number of heads.
        chunk: keys in VMEM at a time; a multiple of `keys`.
    """

    queries: int
    keys: int
    tile: int
    heads: int
    chunk: int


def most_heads(dtype: str) -> int:
    """How many heads a step may compute: 16, of float32 8."""
    return _HEADS_BYTES // jnp.dtype(dtype).itemsize


def value_rows(width: int, dtype: str) -> int:
    """Rows of the transposed values: the width and one row of ones, in whole tiles."""
    return round_up(width + 1, _SUBLANES * 4 // jnp.dtype(dtype).itemsize)


def padded_rows(num_rows: int, blocks: Blocks) -> int:
    """Patches with padding to whole blocks."""
    return round_up(num_rows, max(blocks.queries, blocks.keys))


def vmem_bytes(blocks: Blocks, num_rows: int, width: int, dtype: str) -> int:
    """VMEM of one grid step: operands twice (the next step's are copied in), scratch, values.

    Args:
        blocks: the block sizes.
        num_rows: P.
        width: H.
        dtype: of q, k and v.
    """
    size = jnp.dtype(dtype).itemsize
    lanes, rows = round_up(width, NUM_LANES), value_rows(width, dtype)
    sums = rows * blocks.queries * 4
    row_vector = _SUBLANES * blocks.queries * 4
    per_head = 2 * size * (blocks.queries + blocks.chunk) * (lanes + rows) + 3 * row_vector + sums
    if blocks.chunk < padded_rows(num_rows, blocks):
        per_head += sums
    # Logits, masks and weights of a few products are alive at a time.
    values = 2 * blocks.keys * blocks.queries * (4 + size)
    return blocks.heads * per_head + 2 * row_vector + values


def vmem_limit_bytes(chip: Chip) -> int:
    """What a kernel may take."""
    return int(chip.vmem_bytes * _VMEM_SHARE)


def pick_blocks(num_rows: int, num_heads: int, width: int, dtype: str, chip: Chip) -> Blocks:
    """The block sizes of a shape on one device: from the table, else by the formula.

    Args:
        num_rows: P.
        num_heads: on one device.
        width: H.
        dtype: of q, k and v.
        chip: bounds the VMEM.

    Raises:
        ValueError: the smallest blocks do not fit; the message gives the numbers.
    """
    tuned = TABLE.get((chip.name, num_rows, num_heads, width, dtype))
    if tuned is None:
        return formula(num_rows, num_heads, width, dtype, chip)
    sizes = dict(zip((field.name for field in fields(Blocks)), tuned, strict=True))
    return fit(Blocks(**sizes), num_rows, width, dtype, chip)


def formula(num_rows: int, num_heads: int, width: int, dtype: str, chip: Chip) -> Blocks:
    """As many heads at a time as fit, up to 16; of few, twice the queries; all keys, or what fits.

    A visit of a key block fills the matrix units and drains them once, whatever the heads. Half as
    many heads of float32, whose products take longer, to run and to compile. See `pick_blocks`.
    """
    size = min(512, round_up(num_rows, NUM_LANES))
    wanted = Blocks(
        queries=size,
        keys=size,
        tile=256 if size == 512 else size,
        heads=_divisor(num_heads, most_heads(dtype)),
        chunk=round_up(num_rows, size),
    )
    for most in (8, 4):
        if vmem_bytes(wanted, num_rows, width, dtype) > vmem_limit_bytes(chip):
            wanted = replace(wanted, heads=_divisor(num_heads, min(most, wanted.heads)))
    if wanted.heads <= 4 and num_rows >= 4096:
        wanted = replace(wanted, queries=1024, chunk=round_up(num_rows, 1024))
    return fit(wanted, num_rows, width, dtype, chip)


def fit(blocks: Blocks, num_rows: int, width: int, dtype: str, chip: Chip) -> Blocks:
    """The blocks, smaller where they need more VMEM than a kernel may take.

    Raises:
        ValueError: see `pick_blocks`.
    """
    limit_bytes = vmem_limit_bytes(chip)
    while (need_bytes := vmem_bytes(blocks, num_rows, width, dtype)) > limit_bytes:
        if blocks.heads > 4:
            blocks = replace(blocks, heads=_divisor(blocks.heads, blocks.heads - 1))
        elif blocks.chunk > max(_MIN_CHUNK, blocks.keys):
            blocks = replace(blocks, chunk=round_up(blocks.chunk // 2, blocks.keys))
        elif blocks.heads > 1:
            blocks = replace(blocks, heads=_divisor(blocks.heads, blocks.heads - 1))
        elif blocks.queries > NUM_LANES:
            size = round_up(blocks.queries // 2, NUM_LANES)
            blocks = Blocks(queries=size, keys=size, tile=size, heads=1, chunk=size)
        else:
            raise ValueError(
                f"vision attention of {num_rows} patches, width {width}, {dtype} needs "
                f"{need_bytes} bytes of VMEM in its smallest blocks {blocks}; a kernel on "
                f"{chip.name} may take {limit_bytes}: use narrower heads or another chip"
            )
    return blocks


def _divisor(value: int, most: int) -> int:
    """The largest divisor that is at most `most`."""
    return next(n for n in range(most, 0, -1) if value % n == 0)
