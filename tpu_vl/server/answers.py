"""Engine outputs of one choice to typed events: text, log-probabilities, the end."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, cast

from tpu_vl.chat.detokenize import Detokenizer, TextDelta
from tpu_vl.engine.messages import AddRequest, Output, TokenLogprobs
from tpu_vl.errors import TpuVlError
from tpu_vl.server.budget import Reservation
from tpu_vl.server.metrics import Metrics, RequestTimes
from tpu_vl.server.state import LoadedModel
from tpu_vl.types import Request


@dataclass(kw_only=True)
class Usage:
    """Token counts of one request, over all its choices.

    Args:
        prompt_tokens: placeholders included.
        image_tokens, video_tokens: placeholders of each kind; timestamps count as text.
        cached_tokens: prompt tokens taken from the prefix cache.
        completion_tokens: answer tokens, the stop token included.
    """

    prompt_tokens: int
    image_tokens: int = 0
    video_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(kw_only=True)
class Held:
    """What a request holds of the front end until it ends.

    Args:
        release: takes the request off the open ones.
        reservation: host bytes of its patches, once there are any.
    """

    release: Callable[[], None]
    reservation: Reservation | None = None
    _closed: bool = field(default=False, init=False)

    def close(self) -> None:
        """Gives all back; may be called again."""
        if self._closed:
            return
        self._closed = True
        self.release()
        if self.reservation is not None:
            self.reservation.close()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that is ready for the engine, and what it holds until it ends.

    Args:
        request: as parsed.
        adds: one engine message per choice.
        usage: filled further while the answer runs.
        held: given back by `close`.
        arrived_s: `time.monotonic()` at arrival.
    """

    request: Request
    adds: tuple[AddRequest, ...]
    usage: Usage
    held: Held
    arrived_s: float

    def close(self) -> None:
        """Gives back what the request holds; may be called again."""
        self.held.close()


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one answer token and of its likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New text of one choice.

    Args:
        index: which choice.
        text: may be empty: the first token, or one whose text is not whole yet.
        logprobs: of the tokens whose text is now out, when asked for.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of one choice.

    Args:
        index: which choice.
        reason: why it ended.
        stop_reason: the stop string or the client's stop token id that ended it.
    """

    index: int
    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


Event = Delta | Finished
EventQueue = asyncio.Queue[Event | Exception]


class Choice:
    """One answer of a request: reads the engine's outputs until it ends or is closed.

    Args:
        index: which choice.
        prepared: the request; its usage is counted up.
        model: gives tokenizer and engine client.
        metrics: told of tokens and times.
    """

    def __init__(
        self,
        *,
        index: int,
        prepared: Prepared,
        model: LoadedModel,
        metrics: Metrics,
    ) -> None:
        sampling = prepared.request.sampling
        self._index = index
        self._add = prepared.adds[index]
        self._usage = prepared.usage
        self._client = model.client
        self._sampling = sampling
        self._times: RequestTimes = metrics.start(prepared.arrived_s, prepared.usage.prompt_tokens)
        self._detokenizer = Detokenizer(
            model.tokenizer,
            stop=sampling.stop,
            include_stop_str=sampling.include_stop_str,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )
        self._logprobs: deque[TokenLogprob] = deque()
        self._started = False

    async def run(self, events: EventQueue) -> None:
        """Puts events until `Finished`, or the error that ended the choice."""
        reason = "abort"
        try:
            finished = await self._read(events)
            reason = finished.reason
            events.put_nowait(finished)
        except Exception as error:
            reason = "error"
            events.put_nowait(error)
        finally:
            self._times.finish(reason)

    async def _read(self, events: EventQueue) -> Finished:
        # Leaving the block early closes the iterator, which sends Abort to the engine.
        generator = cast(AsyncGenerator[Output, None], self._client.generate(self._add))
        async with aclosing(generator) as outputs:
            async for output in outputs:
                self._usage.cached_tokens = max(self._usage.cached_tokens, output.num_cached_tokens)
                stop = self._take_tokens(output, events)
                if stop is not None:
                    return Finished(index=self._index, reason="stop", stop_reason=stop)
                if output.finish_reason is not None:
                    return self._end(output, events)
        raise TpuVlError("the engine ended the request without a reason")

    def _take_tokens(self, output: Output, events: EventQueue) -> str | None:
        """Adds an output's tokens; gives the stop string if one of them completes it."""
        self._times.tokens(len(output.token_ids), time.monotonic())
        text, released = "", 0
        for position, token_id in enumerate(output.token_ids):
            self._usage.completion_tokens += 1
            self._note_logprob(output, position)
            if self._is_hidden_stop(output, position):
                continue
            delta = self._detokenizer.push(token_id)
            text, released = text + delta.text, released + delta.num_released
            if delta.stop is not None:
                self._send(TextDelta(text=text, num_released=released), events)
                return delta.stop
        if output.token_ids:
            self._send(TextDelta(text=text, num_released=released), events)
        return None

    def _is_hidden_stop(self, output: Output, position: int) -> bool:
        """A stop token ends the answer but is not part of its text."""
        last = position == len(output.token_ids) - 1
        stopped = output.finish_reason == "stop" and output.stop_token_id is not None
        return last and stopped and not self._sampling.include_stop_str

    def _end(self, output: Output, events: EventQueue) -> Finished:
        if output.finish_reason not in ("stop", "length"):
            raise TpuVlError(
                output.error or f"the engine ended the request: {output.finish_reason}"
            )
        rest = self._detokenizer.finish()
        if rest.stop is not None:
            self._send(rest, events)
            return Finished(index=self._index, reason="stop", stop_reason=rest.stop)
        self._send(TextDelta(text=rest.text, num_released=len(self._logprobs)), events)
        own = (
            output.stop_token_id if output.stop_token_id in self._sampling.stop_token_ids else None
        )
        return Finished(index=self._index, reason=output.finish_reason, stop_reason=own)

    def _note_logprob(self, output: Output, position: int) -> None:
        if self._sampling.logprobs is None:
            return
        entry: TokenLogprobs = output.logprobs[position]
        self._logprobs.append(
            TokenLogprob(token_id=output.token_ids[position], logprob=entry.logprob, top=entry.top)
        )

    def _send(self, delta: TextDelta, events: EventQueue) -> None:
        """Sends what is new; the first token is sent even when its text is not whole."""
        count = min(delta.num_released, len(self._logprobs))
        logprobs = tuple(self._logprobs.popleft() for _ in range(count))
        if delta.text or logprobs or not self._started:
            self._started = True
            events.put_nowait(Delta(index=self._index, text=delta.text, logprobs=logprobs))
