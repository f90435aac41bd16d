"""The typed messages that cross between a front end and the engine: nothing else does.

They are msgspec structs, so the same schema travels through a queue in one process or as
MessagePack over a socket (arrays are carried as bytes with their shape known from the fields).
"""

import msgspec
import numpy as np

from tpu_vl.types import FinishReason, MediaKind


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Per-row sampling data of a request; text-level stops stay with the front end.

    Args:
        max_tokens: answer limit in tokens, >= 1, already cut to the context limit.
        stop_token_ids: ids that end the answer (the model's end tokens unless `ignore_eos`).
        seed: uint32.
        num_logprobs: -1: none; otherwise alternatives per token, 0 to 20.
        logit_bias: (token id, value) pairs, at most `layout.BIAS_CAPACITY` of them.
        The other fields are those of `tpu_vl.types.SamplingParams`.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1
    stop_token_ids: tuple[int, ...] = ()


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """One image or video, ready for the tower.

    Args:
        kind: "image" or "video".
        digest: 32 bytes over pixels, grid and processor settings.
        grid_thw: temporal groups and patch grid (in patches, before merging).
        patches: uint8 bytes of [t * h * w, W], frame after frame, merge blocks contiguous.
        starts: prompt index of the first placeholder of each of the t frames.
    """

    kind: MediaKind
    digest: bytes
    grid_thw: tuple[int, int, int]
    patches: bytes
    starts: tuple[int, ...]

    def patches_PW(self) -> np.ndarray:
        """The patches as a read-only uint8 view [t * h * w, W]."""
        t, h, w = self.grid_thw
        return np.frombuffer(self.patches, np.uint8).reshape(t * h * w, -1)


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Generate an answer.

    Args:
        token_ids: int32 bytes of the prompt, placeholders expanded, real ids only.
        positions: int32 bytes of [3, T] M-RoPE positions; empty: positions are 0..T-1.
        position_delta: position of answer token i is T + i + position_delta.
        media: in prompt order.
    """

    request_id: str
    token_ids: bytes
    positions: bytes = b""
    position_delta: int = 0
    media: tuple[Media, ...] = ()
    sampling: Sampling


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget a request and give back all that it holds; unknown ids are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """End the loop after the current step."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one answer position, of the model's raw distribution."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """New answer tokens of one request.

    Args:
        token_ids: tokens since the last Output of this request; a stop token is included.
        logprobs: one entry per token when asked for.
        finish_reason: set on the last Output of a request.
        stop_token_id: the stop token that ended it, if one did.
        error: what went wrong when finish_reason is "error"; safe to show a client.
        num_cached_tokens: prompt tokens taken from the prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """State of the engine after a step, for /metrics; counters are totals since the start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    pool_usage: float = 0.0
    preemptions_total: int = 0
    steps_total: int = 0
    frames_encoded_total: int = 0
    patches_encoded_total: int = 0
    patches_padded_total: int = 0
    encoder_calls_total: int = 0
    media_cache_queries_total: int = 0
    media_cache_hits_total: int = 0


class Dead(msgspec.Struct, frozen=True, kw_only=True, tag="dead"):
    """The loop has ended on an error; no further message follows."""

    reason: str


ToEngine = AddRequest | Abort | Shutdown
FromEngine = Output | Stats | Dead
