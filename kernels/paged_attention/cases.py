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
        cache_dtype: of the pages; int8 for TPU v5 and v6, float8_e4m3fn for 7x.
        tp: devices over which the heads are split where it divides them.
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
    tp: int = 1

    @property
    def decodes(self) -> bool:
        """Whether it is a step of decoding alone: one new token each."""
        return all(new == 1 for new in self.q_lens)


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


QUANTISED: dict[str, Case] = {
    "int8": _small((1, 40, 1, 3), (200, 0, 15, 61), cache_dtype="int8"),
    "int8_bfloat16": _small((1, 50, 2), (70, 0, 30), dtype="bfloat16", cache_dtype="int8"),
    "float8": _small((1, 50, 2), (70, 0, 30), dtype="bfloat16", cache_dtype="float8_e4m3fn"),
}

# Query heads, K/V heads and head width of the language models' attention.
MODELS: dict[str, tuple[int, int, int]] = {
    "qwen3_vl_2b": (16, 8, 128),
    "qwen3_vl_4b": (32, 8, 128),
    "qwen3_vl_8b": (32, 8, 128),
    "qwen3_vl_32b": (64, 8, 128),
    "qwen3_vl_30b_a3b": (32, 4, 128),
    "qwen3_vl_235b_a22b": (64, 4, 128),
    "qwen2_5_vl_7b": (28, 4, 128),
    "qwen3_5_27b": (24, 4, 256),
    "qwen3_5_35b_a3b": (16, 2, 256),
    "qwen3_5_397b_a17b": (32, 2, 256),
}
DEVICES = (1, 4, 8)


def _real(
    model: str,
    num_tokens: int,
    q_lens: tuple[int, ...],
    past_lens: tuple[int, ...],
    tp: int,
    page_size: int = 64,
    cache_dtype: str = "bfloat16",
) -> Case:
    num_heads, num_kv_heads, width = MODELS[model]
    return Case(
        num_tokens=num_tokens,
        num_seqs=64,
        num_heads=num_heads,
        num_kv_heads=max(num_kv_heads, tp),  # fewer heads than devices are repeated
        width=width,
        page_size=page_size,
        max_pages=32768 // page_size,
        q_lens=q_lens,
        past_lens=past_lens,
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        tp=tp,
    )


def _decode(model: str, tp: int, page_size: int = 64, cache_dtype: str = "bfloat16") -> Case:
    """64 sequences whose context is 4096 tokens, the new one included."""
    return _real(model, 64, (1,) * 64, (4095,) * 64, tp, page_size, cache_dtype)


def _ragged(model: str, tp: int, page_size: int = 64, cache_dtype: str = "bfloat16") -> Case:
    """64 sequences whose contexts are spread from 41 to 4073 tokens: most blocks are not full."""
    return _real(model, 64, (1,) * 64, tuple(range(40, 4096, 64)), tp, page_size, cache_dtype)


def _prefill(model: str, tp: int, cache_dtype: str = "bfloat16") -> Case:
    """A chunk of 1024 tokens that ends at 8192."""
    return _real(model, 1024, (1024,), (8192 - 1024,), tp, cache_dtype=cache_dtype)


def _short(model: str, tp: int) -> Case:
    """Eight prompts of 128 tokens."""
    return _real(model, 1024, (128,) * 8, (0,) * 8, tp)


def _mixed(model: str, tp: int) -> Case:
    """A chunk of 512 tokens that ends at 4096 beside 48 decoding sequences of 4096."""
    return _real(model, 1024, (1,) * 48 + (512,), (4095,) * 48 + (4096 - 512,), tp)


def _whole_heads(model: str, tp: int) -> bool:
    return MODELS[model][0] % tp == 0


REAL: dict[str, Case] = {
    **{
        f"{model}_{what}_tp{tp}": make(model, tp)
        for model in MODELS
        for tp in DEVICES
        for what, make in (("decode_4096", _decode), ("decode_ragged", _ragged))
        if _whole_heads(model, tp)
    },
    **{
        f"{model}_{what}_tp{tp}": make(model, tp)
        for model in MODELS
        for tp in DEVICES
        for what, make in (
            ("prefill_1024_at_8192", _prefill),
            ("prefill_8_of_128", _short),
            ("mixed_4096", _mixed),
        )
        if _whole_heads(model, tp)
    },
    **{
        f"qwen3_vl_8b_{what}_page{size}_tp4": make("qwen3_vl_8b", 4, page_size=size)
        for size in (16, 32, 128, 256)
        for what, make in (("decode_4096", _decode), ("decode_ragged", _ragged))
    },
    **{
        f"{model}_{what}_{dtype}_tp{tp}": make(model, tp, cache_dtype=dtype)
        for model in ("qwen3_vl_8b", "qwen3_5_397b_a17b")
        for tp in DEVICES
        for dtype in ("int8", "float8_e4m3fn")
        for what, make in (
            ("decode_4096", _decode),
            ("decode_ragged", _ragged),
            ("prefill_1024_at_8192", _prefill),
        )
    },
}
