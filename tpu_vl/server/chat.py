"""The body of POST /v1/chat/completions to the internal request, every field checked."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_vl.errors import RequestError
from tpu_vl.server.content import check_mm_kwargs, parse_messages
from tpu_vl.server.fields import (
    Body,
    clean,
    read_bool,
    read_float,
    read_int,
    read_object,
    read_str,
    shown,
    wrong,
)
from tpu_vl.types import MediaPart, Request, SamplingParams

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64

# Fields that would change the answer and are not served: name -> values that change nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "logits_processors": ([],),
    "reasoning_effort": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "media_io_kwargs": ({},),
    "cache_salt": (),
    "priority": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "documents": ([],),
    "chat_template": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """One chat completion call.

    Args:
        request: what to answer.
        model: the id named by the client; None: the served one.
        num_choices: answers asked for (`n`), >= 1.
        stream: answer as server-sent events.
        include_usage: end the stream with a usage chunk.
        continuous_usage: usage so far in every chunk.
    """

    request: Request
    model: str | None
    num_choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool


def parse_chat(body: object, defaults: Mapping[str, object], header_id: str | None) -> ChatCall:
    """Reads a chat completion body.

    Args:
        body: the parsed JSON.
        defaults: generation_config.json's values, used where the client sends null or nothing.
        header_id: the x-request-id header, used where the body has no `request_id`.

    Raises:
        RequestError: naming the field, its value and what is expected.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body is {shown(body)}; expected a JSON object")
    _refuse_unserved(body)
    mm_kwargs = {k: v for k, v in read_object(body, "mm_processor_kwargs").items() if v is not None}
    check_mm_kwargs(mm_kwargs)
    messages = parse_messages(body.get("messages"), mm_kwargs)
    resume = read_bool(body, "continue_final_message", False)
    open_turn = read_bool(body, "add_generation_prompt", not resume)
    if resume and open_turn:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true; set one of them",
            param="continue_final_message",
        )
    if resume and messages[-1].role != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of role assistant, not "
            f"{messages[-1].role}",
            param="messages",
        )
    if resume and any(isinstance(part, MediaPart) for part in messages[-1].parts):
        raise RequestError(
            "continue_final_message needs a last message of text only", param="messages"
        )
    request = Request(
        request_id=_read_request_id(body, header_id),
        messages=messages,
        sampling=read_sampling(body, defaults),
        template_kwargs=read_object(body, "chat_template_kwargs"),
        add_generation_prompt=open_turn,
        continue_final_message=resume,
    )
    options = read_object(body, "stream_options")
    stream = read_bool(body, "stream", False)
    if options and not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    continuous = read_bool(options, "continuous_usage_stats", False)
    return ChatCall(
        request=request,
        model=read_str(body, "model"),
        num_choices=read_int(body, "n", low=1, high=MAX_CHOICES) or 1,
        stream=stream,
        include_usage=read_bool(options, "include_usage", False),
        continuous_usage=continuous,
    )


def read_sampling(body: Body, defaults: Mapping[str, object]) -> SamplingParams:
    """Sampling fields of a body over the checkpoint's defaults.

    Args:
        body: the parsed JSON.
        defaults: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `do_sample`
            (false: greedy unless the client sets a temperature).

    Raises:
        RequestError: naming the field, its value and its range.
    """
    temperature = read_float(body, "temperature", low=0, high=100)
    if temperature is None:
        greedy = defaults.get("do_sample") is False
        temperature = 0.0 if greedy else _default(defaults, "temperature", 1.0)
    top_p = read_float(body, "top_p", low=0, high=1, open_low=True)
    top_k = read_int(body, "top_k", low=-1)
    min_p = read_float(body, "min_p", low=0, high=1)
    repetition = read_float(body, "repetition_penalty", low=0, high=100, open_low=True)
    max_tokens = _read_max_tokens(body)
    min_tokens = read_int(body, "min_tokens", low=0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=max(0, int(_default(defaults, "top_k", 0)) if top_k is None else top_k),
        top_p=_default(defaults, "top_p", 1.0) if top_p is None else top_p,
        min_p=_default(defaults, "min_p", 0.0) if min_p is None else min_p,
        seed=read_int(body, "seed", low=-(1 << 63), high=(1 << 64) - 1),
        repetition_penalty=(
            _default(defaults, "repetition_penalty", 1.0) if repetition is None else repetition
        ),
        presence_penalty=read_float(body, "presence_penalty", low=-2, high=2) or 0.0,
        frequency_penalty=read_float(body, "frequency_penalty", low=-2, high=2) or 0.0,
        logit_bias=_read_logit_bias(body),
        logprobs=_read_logprobs(body),
        stop=_read_stop(body),
        stop_token_ids=_read_token_ids(body, "stop_token_ids"),
        ignore_eos=read_bool(body, "ignore_eos", False),
        skip_special_tokens=read_bool(body, "skip_special_tokens", True),
        include_stop_str=read_bool(body, "include_stop_str_in_output", False),
    )


def _default(defaults: Mapping[str, object], name: str, fallback: float) -> float:
    value = defaults.get(name)
    return float(value) if isinstance(value, int | float) else fallback


def _read_request_id(body: Body, header_id: str | None) -> str:
    request_id = read_str(body, "request_id") or header_id
    if request_id is None:
        return secrets.token_hex(12)
    if len(request_id) > 256 or not (request_id.isascii() and request_id.isprintable()):
        raise wrong("request_id", request_id, "at most 256 printable ASCII characters")
    return request_id


def _read_max_tokens(body: Body) -> int | None:
    newer = read_int(body, "max_completion_tokens", low=1)
    older = read_int(body, "max_tokens", low=1)
    return older if newer is None else newer


def _read_logprobs(body: Body) -> int | None:
    wanted = read_bool(body, "logprobs", False)
    top = read_int(body, "top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else None


def _read_stop(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise wrong("stop", value, "a string, a list of strings, [] or null; none of them empty")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS}", param="stop")
    return tuple(clean(s) for s in stops)


def _read_token_ids(body: Body, name: str) -> tuple[int, ...]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value
    ):
        raise wrong(name, value, "a list of token ids")
    return tuple(value)


def _read_logit_bias(body: Body) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in read_object(body, "logit_bias").items():
        path = f"logit_bias.{key}"
        if not key.isdecimal():
            raise wrong(path, key, "a token id as key")
        number = read_float({path: value}, path, low=-100, high=100)
        if number is None:
            raise wrong(path, value, "a number in [-100, 100]")
        bias[int(key)] = number
    return bias


def _refuse_unserved(body: dict[str, Any]) -> None:
    """Refuses what is not served but would change the answer: it is never dropped silently."""
    if body.get("tools") and body.get("tool_choice") != "none":
        raise RequestError(
            'tools are not supported; leave them out or set tool_choice: "none"', param="tools"
        )
    form = read_object(body, "response_format").get("type", "text")
    if form != "text":
        raise RequestError(
            f"response_format.type {shown(form)} is not supported; use text",
            param="response_format",
        )
    if body.get("modalities") not in (None, [], ["text"]):
        raise RequestError("modalities: only text answers are given", param="modalities")
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not supported; leave it out", param=name)
