"""Named shapes of paged attention, shared by tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Args:
        num_tokens: T, the capacity.
        num_seqs: B, the capacity.
        num_heads: N.
        num_kv_heads: K.
        width: H.
        page_size: S.
        max_pages: M, pages of the longest sequence.
        q_lens: new tokens of each live sequence.
        past_lens: tokens of each already in the cache.
        dtype: of q, k, v.
        cache_dtype: of the pages.
    """

    num_tokens: int
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    width: int
    page_size: int
    max_pages: int
    q_lens: tuple[int, ...]
    past_lens: tuple[int, ...]
    dtype: str = "float32"
    cache_dtype: str = "float32"


def _small(q_lens: tuple[int, ...], past_lens: tuple[int, ...], **changes: object) -> Case:
    fields: dict[str, object] = {
        "num_tokens": 96,
        "num_seqs": 6,
        "num_heads": 4,
        "num_kv_heads": 2,
        "width": 16,
        "page_size": 8,
        "max_pages": 40,
    }
    return Case(q_lens=q_lens, past_lens=past_lens, **(fields | changes))  # pyright: ignore


SMALL: dict[str, Case] = {
    "decode": _small((1,) * 5, (0, 7, 8, 100, 319), num_tokens=8),
    "prefill": _small((96,), (0,)),
    "chunk": _small((70,), (130,)),
    "mixed": _small((1, 40, 1, 3), (200, 0, 15, 61)),
    "page_edges": _small((8, 16, 1, 64), (0, 8, 7, 64)),
    "one_huge_many_tiny": _small((1, 1, 1, 80, 1), (2, 0, 1, 230, 3)),
    "nothing": _small((), ()),
    "group_1": _small((1, 20), (9, 3), num_kv_heads=4),
    "group_16": _small((1, 20), (9, 3), num_heads=16, num_kv_heads=1),
    "bfloat16": _small((1, 50, 2), (70, 0, 30), dtype="bfloat16", cache_dtype="bfloat16"),
    "bfloat16_wide_cache": _small((1, 50, 2), (70, 0, 30), dtype="bfloat16"),
}


def _qwen3_vl_8b(num_tokens: int, q_lens: tuple[int, ...], past_lens: tuple[int, ...]) -> Case:
    return Case(
        num_tokens=num_tokens,
        num_seqs=64,
        num_heads=32,
        num_kv_heads=8,
        width=128,
        page_size=64,
        max_pages=512,
        q_lens=q_lens,
        past_lens=past_lens,
        dtype="bfloat16",
        cache_dtype="bfloat16",
    )


QWEN3_VL_8B: dict[str, Case] = {
    "qwen3_vl_8b_decode": _qwen3_vl_8b(64, (1,) * 64, (2000,) * 64),
    "qwen3_vl_8b_prefill": _qwen3_vl_8b(1024, (1024,), (0,)),
}
