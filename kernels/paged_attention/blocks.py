"""Block sizes of the paged attention kernel, and the vector memory that they take."""

from dataclasses import dataclass, fields, replace

from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.chips import Chip
from tpu_vl.kernels.paged_attention.tuned import TABLE

DECODE_BLOCK_BYTES = 1 << 20  # of K and V: long enough to hide the latencies of a block's steps
PREFILL_BLOCK_VALUES = 1 << 19  # of K of all heads
SUBLANES = 8  # of a vector register of 32-bit values
STACK_BYTES = 6 << 20  # what the compiler adds for values that leave the registers
LEAST_ROWS = 128
COMMON_ROWS = 512  # of a prefill tile where nothing speaks for more
COMMON_TOKENS = 128  # of a prefill tile: larger ones only where they are few of many
WIDE_UNITS = 3 * 2**17  # operations per cycle above which a block's fixed costs show
SMEM_BYTES = 1 << 20  # scalar memory of a core, by what the compiler says of all four chips
SMEM_RESERVED = 16 << 10  # the compiler's own, and scalars that leave the registers


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sizes that do not change a result.

    Args:
        decode_keys: cached tokens of a key block in decoding; rounded to whole pages.
        prefill_keys: the same in prefill.
        prefill_rows: query rows (tokens times the padded group) of a prefill tile: a power of two,
            at least 128.
        num_bufs: key blocks in VMEM at once, at least 3: one or two computed, the others in flight.
    """

    decode_keys: int
    prefill_keys: int
    prefill_rows: int
    num_bufs: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the need for VMEM depends on, of one device.

    Args:
        num_rows: C, rows of a cache slot.
        cache_bytes: of one value of the cache.
        query_rows: rows of 128 lanes of one token's queries.
        group: query rows of one token and K/V head.
        query_bytes: of one value of the queries.
        num_kv_heads: K.
        width: H, padded to lanes.
    """

    num_rows: int
    cache_bytes: int
    query_rows: int
    group: int
    query_bytes: int
    num_kv_heads: int
    width: int

    @property
    def slot_bytes(self) -> int:
        """Of one token in the cache."""
        return self.num_rows * NUM_LANES * self.cache_bytes


def pick_blocks(
    num_heads: int, num_kv_heads: int, width: int, page_size: int, cache_dtype: str, chip: Chip
) -> Blocks:
    """Block sizes of a shape on one device: from the table, else by the formula.

    Args:
        num_heads, num_kv_heads: N and K of one device.
        width: H.
        page_size: S.
        cache_dtype: of the pages.
        chip: that runs the kernel.
    """
    tuned = TABLE.get((chip.name, num_heads, num_kv_heads, width, page_size, cache_dtype))
    if tuned is None:
        return formula(num_heads, num_kv_heads, width, cache_dtype, chip)
    return Blocks(**dict(zip((field.name for field in fields(Blocks)), tuned, strict=True)))


def formula(num_heads: int, num_kv_heads: int, width: int, cache_dtype: str, chip: Chip) -> Blocks:
    """Block sizes by shape; see `pick_blocks`.

    Decode blocks have about `DECODE_BLOCK_BYTES`, prefill blocks a constant number of products,
    since all heads are unrolled: the program's size does not grow with K. A block costs some
    hundred cycles beside its products, which wide matrix units finish early: there tiles are
    larger, so that blocks have more products and are fewer.
    """
    value_bytes = {"float32": 4, "bfloat16": 2}.get(cache_dtype, 1)
    slot_bytes = 2 * num_kv_heads * round_up(width, NUM_LANES) * value_bytes
    keys = 2048
    while keys > 256 and keys * slot_bytes > DECODE_BLOCK_BYTES:
        keys //= 2
    prefill_keys = 1024
    while prefill_keys > 256 and prefill_keys * num_kv_heads * width > PREFILL_BLOCK_VALUES:
        prefill_keys //= 2
    rows = COMMON_ROWS
    if chip.bf16_flops / chip.clock_hz >= WIDE_UNITS:
        rows *= 4 if num_heads > 8 * num_kv_heads else 2
    return Blocks(decode_keys=keys, prefill_keys=prefill_keys, prefill_rows=rows, num_bufs=4)


def vmem_limit_bytes(chip: Chip) -> int:
    """What the kernel may take; the rest is left to XLA."""
    return chip.vmem_bytes * 3 // 4


def vmem_bytes(blocks: Blocks, sizes: Sizes, page_size: int) -> int:
    """What the kernel takes with these blocks."""
    keys = max(round_up(k, page_size) for k in (blocks.decode_keys, blocks.prefill_keys))
    tile = blocks.prefill_rows // sizes.group
    token_bytes = sizes.query_rows * NUM_LANES * sizes.query_bytes
    decode_rows = round_up(sizes.query_rows, SUBLANES) * (blocks.decode_keys + 4 * NUM_LANES) * 4
    state = sizes.num_kv_heads * blocks.prefill_rows * (2 * SUBLANES + sizes.width) * 4
    values = blocks.prefill_keys * (2 * blocks.prefill_rows + 4 * sizes.width) * 4
    return (
        blocks.num_bufs * keys * sizes.slot_bytes
        + (blocks.num_bufs + 1) * tile * token_bytes
        + 2 * blocks.num_bufs * token_bytes
        + decode_rows
        + state
        + values
        + STACK_BYTES
    )


def fit(blocks: Blocks, sizes: Sizes, page_size: int, num_tokens: int, chip: Chip) -> Blocks:
    """Shrinks blocks until they fit the chip, and tiles to the tokens that there are.

    Runs of new tokens that do not fill a tile pay for all of it. Where a step has few tokens, runs
    are short: tiles of more than `COMMON_TOKENS` are for steps of at least four of them.

    Raises:
        ValueError: not even the smallest blocks fit; the message gives the numbers.
    """
    rows = LEAST_ROWS
    while rows < min(blocks.prefill_rows, num_tokens * sizes.group):
        rows *= 2
    most_rows = max(COMMON_ROWS, COMMON_TOKENS * sizes.group)
    while rows > most_rows and 4 * rows > num_tokens * sizes.group:
        rows //= 2
    blocks = replace(blocks, prefill_rows=rows)
    limit = vmem_limit_bytes(chip)
    least_keys = max(page_size, NUM_LANES)
    while (needed := vmem_bytes(blocks, sizes, page_size)) > limit:
        keys = max(blocks.decode_keys, blocks.prefill_keys)
        if keys > least_keys:
            half = max(keys // 2, least_keys)
            blocks = replace(
                blocks,
                decode_keys=min(blocks.decode_keys, half),
                prefill_keys=min(blocks.prefill_keys, half),
            )
        elif blocks.num_bufs > 3:
            blocks = replace(blocks, num_bufs=3)
        elif blocks.prefill_rows > LEAST_ROWS:
            blocks = replace(blocks, prefill_rows=blocks.prefill_rows // 2)
        else:
            raise ValueError(
                f"paged attention needs {needed} bytes of VMEM with its smallest blocks {blocks} "
                f"for {sizes} and pages of {page_size} tokens; {chip.name} gives it {limit}: use "
                "smaller pages or more devices"
            )
    return blocks


def check_scalar_memory(
    num_seqs: int, max_pages: int, page_size: int, num_tokens: int, tile: int
) -> None:
    """Raises where the page table and the lists of tiles do not fit in scalar memory.

    Args:
        num_seqs: B.
        max_pages: M; the table has B * M entries of 4 bytes.
        page_size: S.
        num_tokens: T.
        tile: tokens of a prefill tile; one of decoding has one, and each tile four entries.

    Raises:
        ValueError: the message gives the numbers and the flags.
    """
    num_tiles = min(num_tokens, num_seqs) + min(num_tokens, num_tokens // tile + num_seqs)
    table_bytes, tile_bytes = 4 * num_seqs * max_pages, 16 * num_tiles
    limit = SMEM_BYTES - SMEM_RESERVED
    if table_bytes + tile_bytes > limit:
        raise ValueError(
            f"paged attention keeps its page table in scalar memory: {num_seqs} sequences of "
            f"{max_pages} pages of {page_size} tokens take {table_bytes} bytes, and {num_tiles} "
            f"tiles {tile_bytes}, of {limit} that there are; lower --max-num-seqs or "
            "--max-model-len, or raise --block-size"
        )
