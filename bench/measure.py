"""From schedules, visits and bytes to times: one case of one op beside its rivals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from bench import matmuls, own, rivals
from bench.programs import Profile, Program
from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.kernels.chips import Chip
from tpu_vl.kernels.paged_attention import blocks as paged_blocks
from tpu_vl.kernels.paged_attention.cases import Case as PagedCase
from tpu_vl.kernels.vision_attention import blocks as vision_blocks
from tpu_vl.kernels.vision_attention.cases import Case as VisionCase

DMA_LATENCY_S = 1e-6  # assumed, from start to completion of one copy out of HBM
BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A program that does a case's work.

    Args:
        name: of the kernel and its blocks.
        program: to compile.
        counts: visits of its named scopes; None: of the whole case, by `own`.
        hbm_bytes: that it moves.
        num_copies: that it starts one by one; 0 where the grid's pipeline copies large blocks.
        copies_in_flight: how many of them at a time.
        grid_steps: of the case. The program may be compiled for a smaller grid: the schedule of a
            step is the same, and one compile serves many cases. None: by the program itself.
        after: what the same program does when this has ended, none of it hidden.
    """

    name: str
    program: Program
    counts: Mapping[str, int]
    hbm_bytes: int
    num_copies: int = 0
    copies_in_flight: int = 1
    grid_steps: int | None = None
    after: "Candidate | None" = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The time of a candidate by the model.

    Args:
        name: of the candidate.
        cycles: of its schedule.
        compute_s: the same over the clock.
        memory_s: of its copies: bytes over bandwidth, or copies times latency over those in flight.
        seconds: the larger one, plus the first copy, which nothing hides, where it copies itself.
        mxu_share: how busy the matrix units are in `cycles`.
        valu_share: how full the vector slots are.
        spill_share: how full the store slots are with spills.
        around_cycles: XLA's estimate of the transposes and padding around the kernel, as compiled.
        scopes_kept: as in `programs.Profile`.
    """

    name: str
    cycles: float
    compute_s: float
    memory_s: float
    seconds: float
    mxu_share: float
    valu_share: float
    spill_share: float
    around_cycles: int
    scopes_kept: bool


def estimate(candidate: Candidate, profile: Profile, chip: Chip) -> Estimate:
    """Joins a candidate's schedule with its visits and its copies."""
    kernel, counts, steps = profile.kernel, candidate.counts, candidate.grid_steps
    cycles = kernel.cycles(counts, steps)
    compute_s = cycles / chip.clock_hz
    memory_s = max(
        candidate.hbm_bytes / chip.hbm_bytes_per_s,
        candidate.num_copies * DMA_LATENCY_S / candidate.copies_in_flight,
    )
    first_s = DMA_LATENCY_S if candidate.num_copies else 0.0
    found = Estimate(
        name=candidate.name,
        cycles=cycles,
        compute_s=compute_s,
        memory_s=memory_s,
        seconds=max(compute_s, memory_s) + first_s,
        mxu_share=kernel.slot_share(counts, "mxu", steps),
        valu_share=kernel.slot_share(counts, "valu", steps),
        spill_share=kernel.slot_share(counts, "spill", steps),
        around_cycles=profile.around_cycles,
        scopes_kept=profile.scopes_kept,
    )
    if candidate.after is None:
        return found
    return one_after_another(found, estimate(candidate.after, profile, chip))


def one_after_another(first: Estimate, second: Estimate) -> Estimate:
    """Two phases of one program: times add up, shares are of the cycles of both."""
    cycles = first.cycles + second.cycles
    sums = ("cycles", "compute_s", "memory_s", "seconds")
    means = ("mxu_share", "valu_share", "spill_share")
    return replace(
        first,
        **{name: getattr(first, name) + getattr(second, name) for name in sums},
        **{
            name: sum(getattr(e, name) * e.cycles for e in (first, second)) / cycles
            for name in means
        },
    )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A case on one device: our kernel, its rivals, and the least that any kernel needs.

    Args:
        op: "vision_attention" or "paged_attention".
        case: its name.
        candidates: ours.
        rivals: jax's kernels in some block sizes.
        floor: the matmuls alone, in some block sizes; towers only.
        flops: of the products that the result needs.
        kv_bytes: of the cached keys and values that the case sees, once; 0 for towers.
        least_bytes: queries, keys, values and results once.
    """

    op: str
    case: str
    ours: Candidate
    rivals: tuple[Candidate, ...]
    floor: tuple[Candidate, ...]
    flops: float
    kv_bytes: int
    least_bytes: int

    def roofline_s(self, chip: Chip) -> float:
        """The larger of operations over peak and bytes over bandwidth."""
        return max(self.flops / chip.bf16_flops, self.least_bytes / chip.hbm_bytes_per_s)


def one_device(case: Any) -> Any:
    """A case as one device of its tp sees it: its share of the heads, or all of them."""
    heads = case.num_kv_heads if isinstance(case, PagedCase) else case.num_heads
    if heads % case.tp:
        return replace(case, tp=1)
    changes = {"num_heads": case.num_heads // case.tp, "tp": 1}
    if isinstance(case, PagedCase):
        changes["num_kv_heads"] = heads // case.tp
    return replace(case, **changes)


def vision_subject(name: str, whole: VisionCase, chip: Chip, *, floor: bool) -> Subject:
    """A tower case; `floor` adds the matmuls alone."""
    case = one_device(whole)
    blocks = vision_blocks.pick_blocks(case.num_rows, case.num_heads, case.width, case.dtype, chip)
    size = jnp.dtype(case.dtype).itemsize
    return Subject(
        op="vision_attention",
        case=name,
        ours=vision_candidate(case, blocks, own.vision_counts(case, blocks)),
        rivals=(*_splash(case, size), *_flash(case, size)),
        floor=tuple(_matmuls(case)) if floor else (),
        flops=4.0 * case.num_heads * case.width * sum(n * n for n in case.segments),
        kv_bytes=0,
        least_bytes=4 * size * case.num_heads * case.width * sum(case.segments),
    )


def vision_candidate(
    case: VisionCase, blocks: vision_blocks.Blocks, counts: Mapping[str, int]
) -> Candidate:
    """Our tower attention in some blocks, with its visits; the case is one device's."""
    return Candidate(
        name="tpu_vl",
        program=own.vision_program(case, blocks),
        counts=counts,
        # Known here, and not from every schedule: the compiler may spill the grid's counter.
        grid_steps=own.vision_steps(case, blocks),
        hbm_bytes=own.vision_bytes(case, blocks),
    )


def _tower_sizes(case: VisionCase) -> dict[str, Any]:
    """Sizes of a call with several steps in each direction, and heads of whole lanes."""
    return {
        "num_rows": min(case.num_rows, 2 * LARGEST_BLOCK),
        "num_heads": 4,
        "width": round_up(case.width, NUM_LANES),
        "dtype": case.dtype,
    }


def _tower_bytes(case: VisionCase, size: int, block_q: int) -> int:
    """Queries and results once, all keys and values per block of queries."""
    row_bytes = case.num_heads * round_up(case.width, NUM_LANES) * size
    return row_bytes * case.num_rows * 2 * (1 + case.num_rows // block_q)


LARGEST_BLOCK = 2048
# Blocks of queries, of keys, of keys in an iteration; larger ones than a case has rows fall out.
SPLASH_BLOCKS = (
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 512),
    (1024, 2048, 1024),
    (2048, 2048, 1024),
)
FLASH_BLOCKS = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024))


def _splash(case: VisionCase, size: int) -> list[Candidate]:
    return [
        Candidate(
            name=f"splash {bq}x{bkv}/{compute}",
            program=Program(
                "rivals.splash_call",
                _tower_sizes(case) | {"block_q": bq, "block_kv": bkv, "block_kv_compute": compute},
            ),
            counts=(counts := rivals.splash_counts(case.num_heads, case.num_rows, bq, bkv)),
            grid_steps=counts["kernel"],
            hbm_bytes=_tower_bytes(case, size, bq),
        )
        for bq, bkv, compute in SPLASH_BLOCKS
        if case.num_rows % bq == 0 and case.num_rows % bkv == 0
    ]


def _flash(case: VisionCase, size: int) -> list[Candidate]:
    return [
        Candidate(
            name=f"flash {bq}x{major}/{block}",
            program=Program(
                "rivals.flash_call",
                _tower_sizes(case) | {"block_q": bq, "block_k_major": major, "block_k": block},
            ),
            counts=(counts := rivals.flash_counts(case.num_heads, case.num_rows, bq, major)),
            grid_steps=counts["kernel"],
            hbm_bytes=_tower_bytes(case, size, bq),
        )
        for bq, major, block in FLASH_BLOCKS
        if case.num_rows % bq == 0 and case.num_rows % major == 0
    ]


# Form, blocks of queries and keys, heads of a step, iterations scheduled together.
MATMUL_BLOCKS = (
    ("rows", 1024, 512, 1, 2),
    ("columns", 1024, 512, 1, 2),
    ("turned", 1024, 1024, 2, 1),
    ("turned", 2048, 512, 1, 2),
    ("turned", 2048, 1024, 1, 2),
)


def _matmuls(case: VisionCase) -> list[Candidate]:
    return [
        Candidate(
            name=f"matmuls {form} {bq}x{bkv} heads {heads} unroll {unroll}",
            program=Program(
                "matmuls.matmuls_call",
                _tower_sizes(case)
                | {
                    "width": case.width,
                    "form": form,
                    "block_q": bq,
                    "block_kv": bkv,
                    "heads": heads,
                    "unroll": unroll,
                },
            ),
            counts=(
                counts := matmuls.matmuls_counts(
                    case.num_heads, case.num_rows, bq, bkv, heads, unroll
                )
            ),
            grid_steps=counts["kernel"],
            hbm_bytes=0,
        )
        for form, bq, bkv, heads, unroll in MATMUL_BLOCKS
        if case.num_rows % bq == 0
        and case.num_rows % (bkv * unroll) == 0
        and case.num_heads % heads == 0
    ]


def paged_subject(name: str, whole: PagedCase, chip: Chip) -> Subject:
    """A paged case on one device."""
    case = one_device(whole)
    blocks = own.paged_blocks_of(case, chip)
    kv_bytes = sum(own.kv_lens(case)) * own.page_bytes(case) // case.page_size
    # Token i of a run of q after `past` sees past + i + 1 keys.
    seen = sum(
        new * past + new * (new + 1) // 2
        for past, new in zip(case.past_lens, case.q_lens, strict=True)
    )
    return Subject(
        op="paged_attention",
        case=name,
        ours=paged_candidate(case, blocks),
        rivals=tuple(_ragged(case)),
        floor=(),
        flops=4.0 * case.num_heads * case.width * seen,
        kv_bytes=kv_bytes,
        least_bytes=kv_bytes + own.query_bytes(case),
    )


def paged_candidate(case: PagedCase, blocks: paged_blocks.Blocks) -> Candidate:
    """Our paged attention in some blocks; the case is one device's.

    A mixed batch decodes first: nothing of one phase hides behind the other.
    """
    found = [
        _paged_phase(case, part, blocks)
        for part in (
            [(q, past) for q, past in zip(case.q_lens, case.past_lens, strict=True) if q == 1],
            [(q, past) for q, past in zip(case.q_lens, case.past_lens, strict=True) if q > 1],
        )
        if part
    ]
    return found[0] if len(found) == 1 else replace(found[0], after=found[1])


def _paged_phase(
    whole: PagedCase, lens: Sequence[tuple[int, int]], blocks: paged_blocks.Blocks
) -> Candidate:
    q_lens, past_lens = zip(*lens, strict=True)
    case = replace(whole, q_lens=q_lens, past_lens=past_lens)
    fetched = own.fetched_pages(case, blocks)
    keys = blocks.decode_keys if case.decodes else blocks.prefill_keys
    return Candidate(
        name="tpu_vl",
        program=own.paged_program(whole, blocks),
        counts=own.paged_counts(case, blocks),
        hbm_bytes=fetched * own.page_bytes(case) + own.query_bytes(case) + own.row_bytes(case),
        num_copies=fetched,
        copies_in_flight=(blocks.num_bufs - 1) * max(1, keys // case.page_size),
    )


# Keys and queries of a block.
RAGGED_DECODE_BLOCKS = ((1024, 16), (2048, 16))
RAGGED_PREFILL_BLOCKS = ((1024, 64), (1024, 128), (2048, 128), (1024, 256))
# Logits of a block, all heads of 128 lanes: the kernel unrolls them, and for twice as many the
# compiler took five minutes, its time growing faster than they do. Many heads get fewer keys.
RAGGED_LOGITS = 1 << 21


def ragged_blocks(case: PagedCase) -> list[tuple[int, int]]:
    """Keys and queries of the blocks in which the rival is tried."""
    heads = case.num_heads * round_up(case.width, NUM_LANES) // NUM_LANES
    found = []
    for keys, queries in RAGGED_DECODE_BLOCKS if case.decodes else RAGGED_PREFILL_BLOCKS:
        while heads * queries * keys > RAGGED_LOGITS:
            keys //= 2
        found.append((keys, queries))
    return list(dict.fromkeys(found))


def _ragged(case: PagedCase) -> list[Candidate]:
    sizes = own.paged_sizes(case)
    lanes = round_up(case.width, NUM_LANES)
    cache_bytes = jnp.dtype(case.cache_dtype).itemsize
    copy_bytes = case.page_size * 2 * case.num_kv_heads * lanes * cache_bytes
    query_bytes = 2 * case.num_tokens * case.num_heads * lanes * BF16_BYTES
    found = []
    for keys, queries in ragged_blocks(case):
        pages = min(case.max_pages, max(1, keys // case.page_size))
        counts = rivals.ragged_counts(
            case.q_lens,
            tuple(own.kv_lens(case)),
            num_tokens=case.num_tokens,
            head_blocks=1,  # heads of one device fit in one block in all real cases
            block_kv=pages * case.page_size,
            block_q=queries,
        )
        copies = counts["compute_with_kv_blk_in_cur_seq"] * pages
        blocks = {"pages_per_block": pages, "queries_per_block": queries}
        found.append(
            Candidate(
                name=f"ragged {keys} keys, {queries} queries",
                program=Program("rivals.ragged_call", sizes | blocks),
                counts=counts,
                hbm_bytes=copies * copy_bytes + query_bytes,
                num_copies=copies,
                copies_in_flight=pages,
            )
        )
    return found


def best(estimates: Sequence[Estimate]) -> Estimate | None:
    """The fastest; None of none."""
    return min(estimates, key=lambda e: e.seconds, default=None)
