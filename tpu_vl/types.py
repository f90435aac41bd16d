"""The values that every protocol fills and every layer reads: one request type for all APIs."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
MediaKind = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one answer are chosen and when it ends.

    Args:
        max_tokens: answer length limit in tokens, >= 1; None: up to the context limit.
        min_tokens: stop tokens are not sampled before this many answer tokens.
        temperature: >= 0; 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens below this share of the likeliest one's probability, in [0, 1].
        seed: makes the row reproducible; None draws one.
        repetition_penalty: > 0; applies to prompt and answer tokens; 1 is off.
        presence_penalty: in [-2, 2]; applies to answer tokens.
        frequency_penalty: in [-2, 2]; applies to answer tokens, times their count.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        logprobs: number of likeliest alternatives reported per token; None reports nothing,
            0 only the chosen token.
        stop: strings that end the answer (kept out of it unless `include_stop_str`).
        stop_token_ids: token ids that end the answer, beside the model's own end tokens.
        ignore_eos: the model's end tokens do not end the answer.
        skip_special_tokens: special tokens are left out of the text.
        include_stop_str: the matched stop string stays in the text.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str: bool = False


@dataclass(frozen=True, kw_only=True)
class MediaPart:
    """One image or video of a request as the client named it, before it is fetched.

    Args:
        kind: what the client says it is.
        urls: one address (data:, http: or https:), or several for a video given as frames.
        param: path of the part in the request, for error messages.
        options: per-part processor options (`min_pixels`, `max_pixels`, `fps`, `num_frames`).
    """

    kind: MediaKind
    urls: tuple[str, ...]
    param: str
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """A run of text of a message."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation, its parts in the order in which the client sent them."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | MediaPart, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What any protocol asks of the server: a conversation or token ids, and how to answer.

    Args:
        request_id: unique in the process.
        messages: the conversation; at least one message.
        sampling: how to choose tokens.
        template_kwargs: extra arguments of the chat template that the client may set.
        add_generation_prompt: end the prompt with the opening of an assistant turn.
        continue_final_message: continue the last (assistant) message instead of opening a turn.
    """

    request_id: str
    messages: tuple[Message, ...]
    sampling: SamplingParams
    template_kwargs: dict[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, kw_only=True)
class MediaSpan:
    """The run of placeholder tokens that one frame of a medium fills in a prompt.

    Args:
        media_index: which medium of the request, in prompt order.
        frame_index: which temporal group of that medium; 0 for an image.
        start: index of the first placeholder token in the prompt.
        num_tokens: merged grid cells of the frame.
    """

    media_index: int
    frame_index: int
    start: int
    num_tokens: int
