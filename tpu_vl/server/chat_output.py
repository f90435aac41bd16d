"""Typed events to the OpenAI chat completion objects, whole and in chunks."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from tpu_vl.chat.tokenizer import Tokenizer
from tpu_vl.server.answers import Delta, Event, Finished, Prepared, TokenLogprob, Usage
from tpu_vl.server.chat import ChatCall

# JSON has no infinity: the logarithm of a probability of zero is shown as this.
_LOWEST_LOGPROB = -9999.0


class ChatWriter:
    """Writes the answer of one call.

    Args:
        call: what was asked.
        prepared: gives the usage.
        model_name: reported in every object.
        fingerprint: `system_fingerprint`.
        tokenizer: for the text and bytes of log-probabilities.
    """

    def __init__(
        self,
        call: ChatCall,
        prepared: Prepared,
        *,
        model_name: str,
        fingerprint: str,
        tokenizer: Tokenizer,
    ) -> None:
        self._call = call
        self._usage = prepared.usage
        self._tokenizer = tokenizer
        self._head = {
            "id": f"chatcmpl-{call.request.request_id}",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The chat.completion object, after the last event."""
        texts = ["" for _ in range(self._call.num_choices)]
        logprobs: list[list[TokenLogprob]] = [[] for _ in texts]
        ends: dict[int, Finished] = {}
        async for event in events:
            if isinstance(event, Finished):
                ends[event.index] = event
            else:
                texts[event.index] += event.text
                logprobs[event.index].extend(event.logprobs)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._logprobs(logprobs[index]),
                "finish_reason": ends[index].reason,
                "stop_reason": ends[index].stop_reason,
            }
            for index, text in enumerate(texts)
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_object(self._usage),
        }

    async def chunks(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
        """Server-sent events: the role with the first text, the end apart, usage only if asked."""
        started: set[int] = set()
        async for event in events:
            if isinstance(event, Finished):
                choice = {
                    "index": event.index,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": event.reason,
                    "stop_reason": event.stop_reason,
                }
            else:
                choice = self._delta(event, first=event.index not in started)
                started.add(event.index)
            yield self._chunk([choice], with_usage=self._call.continuous_usage)
        if self._call.include_usage:
            yield self._chunk([], with_usage=True)
        yield "data: [DONE]\n\n"

    def _delta(self, event: Delta, *, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant"} if first else {}
        return {
            "index": event.index,
            "delta": {**delta, "content": event.text},
            "logprobs": self._logprobs(event.logprobs),
            "finish_reason": None,
        }

    def _chunk(self, choices: list[dict[str, Any]], *, with_usage: bool) -> str:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if with_usage:
            chunk["usage"] = usage_object(self._usage)
        elif self._call.include_usage:
            chunk["usage"] = None
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._call.request.sampling.logprobs is None:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*alternative) for alternative in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": data.decode(errors="replace"),
            "bytes": list(data),
            "logprob": max(logprob, _LOWEST_LOGPROB),
        }


def usage_object(usage: Usage) -> dict[str, Any]:
    """The usage object, the same for whole and streamed answers."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "image_tokens": usage.image_tokens,
            "video_tokens": usage.video_tokens,
        },
    }
