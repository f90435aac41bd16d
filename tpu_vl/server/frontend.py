"""One path for all protocols: a request to engine messages, and outputs to typed events.

In the order in which it runs: gate on capability and counts, fetch, preprocess in a bounded pool of
threads, template and placeholders, context check, positions, engine, detokenise. Everything that a
request holds hangs on its `Prepared`, whose `close` runs on every path, a hang-up included.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from tpu_vl.chat.expand import ExpandedPrompt, expand
from tpu_vl.chat.guard import TextGuard
from tpu_vl.config import ServerConfig
from tpu_vl.engine.messages import AddRequest, Media, Sampling
from tpu_vl.errors import (
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from tpu_vl.server.answers import Choice, Event, EventQueue, Finished, Held, Prepared, Usage
from tpu_vl.server.media import MediaFetcher
from tpu_vl.server.metrics import Metrics
from tpu_vl.server.preprocess import Preprocessor, ReadyMedia
from tpu_vl.server.state import LoadedModel
from tpu_vl.types import MediaPart, Request
from tpu_vl.vision.positions import mrope_positions


class Frontend:
    """Serves requests of one loaded model.

    Args:
        model: ready to answer.
        config: workers, bytes and generation defaults.
        metrics: told of every request.
    """

    def __init__(self, model: LoadedModel, config: ServerConfig, metrics: Metrics) -> None:
        self.model = model
        self.metrics = metrics
        self._num_open = 0
        self._fetcher = MediaFetcher(model.limits, config.max_request_bytes)
        self._preprocessor = None
        if model.processor is not None:
            self._preprocessor = Preprocessor(
                model.processor,
                model.limits,
                config.num_preprocess_workers,
                config.preprocess_bytes,
            )

    @property
    def num_open(self) -> int:
        """Answers that are being prepared, wait or run."""
        return self._num_open

    @property
    def held_bytes(self) -> int:
        """Host bytes of patches of unfinished requests."""
        return 0 if self._preprocessor is None else self._preprocessor.budget.used_bytes

    def close(self) -> None:
        """Ends the preprocessing threads."""
        if self._preprocessor is not None:
            self._preprocessor.close()

    async def prepare(self, request: Request, num_choices: int = 1) -> Prepared:
        """Everything before the engine; the caller must `close` what it returns.

        Raises:
            RequestError: the request cannot be served; names the field or part.
            OverloadedError: the queue is full.
            EngineDeadError: the engine has ended.
        """
        arrived_s = time.monotonic()
        self._admit(num_choices)
        held = Held(release=lambda: self._release(num_choices))
        try:
            parts = [p for m in request.messages for p in m.parts if isinstance(p, MediaPart)]
            self._gate(parts)
            self._check_sampling(request)
            with self.metrics.preprocessing():
                media = await self._load(parts, held)
                prompt, adds = await asyncio.to_thread(self._build, request, media, num_choices)
        except BaseException:
            held.close()
            raise
        return Prepared(
            request=request,
            adds=adds,
            usage=_count(prompt, media),
            held=held,
            arrived_s=arrived_s,
        )

    async def answer(self, prepared: Prepared) -> AsyncGenerator[Event, None]:
        """Runs a prepared request; closing the iterator early aborts it in the engine.

        Yields:
            Events of all choices as they come; each choice ends with `Finished`.

        Raises:
            TpuVlError: the engine failed on the request.
        """
        events: EventQueue = asyncio.Queue()
        choices = [
            Choice(index=index, prepared=prepared, model=self.model, metrics=self.metrics)
            for index in range(len(prepared.adds))
        ]
        tasks = [asyncio.create_task(choice.run(events)) for choice in choices]
        running = len(tasks)
        try:
            while running:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                running -= isinstance(event, Finished)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            prepared.close()

    def _admit(self, num_choices: int) -> None:
        """Counts a request as open, or refuses it: those being preprocessed count too."""
        limit = self.model.max_open_requests
        if self.model.client.dead is not None:
            raise EngineDeadError("the engine has ended; the server must be restarted")
        if num_choices > limit:
            raise RequestError(f"n is {num_choices}; at most {limit} are possible", param="n")
        if self._num_open + num_choices > limit:
            raise OverloadedError(
                f"{self._num_open} answers run or wait, the limit is {limit}; send the request "
                "again later or raise --max-num-queued-reqs"
            )
        self._num_open += num_choices

    def _release(self, num_choices: int) -> None:
        self._num_open -= num_choices

    async def _load(self, parts: Sequence[MediaPart], held: Held) -> list[ReadyMedia]:
        """Fetches and preprocesses the media of a request."""
        if not parts:
            return []
        assert self._preprocessor is not None, "media passed the gate of a text-only model"
        files = await self._fetcher.fetch(parts)
        media, held.reservation = await self._preprocessor.run(parts, files)
        return media

    def _gate(self, parts: Sequence[MediaPart]) -> None:
        counts = {"image": 0, "video": 0}
        limits = {"image": self.model.limits.max_images, "video": self.model.limits.max_videos}
        for part in parts:
            reason = self.model.capability.reason_against(part.kind)
            if reason is not None:
                raise RequestError(
                    f"{part.param}: this server takes no {part.kind}s: {reason}", param=part.param
                )
            counts[part.kind] += 1
        for kind, count in counts.items():
            if count > limits[kind]:
                raise RequestError(
                    f"the request has {count} {kind}s, the limit is {limits[kind]}: send fewer or "
                    f"raise --limit-mm-per-prompt '{{\"{kind}\": {count}}}'",
                    param="messages",
                )

    def _check_sampling(self, request: Request) -> None:
        sampling, model = request.sampling, self.model
        if len(sampling.logit_bias) > model.max_logit_bias:
            raise RequestError(
                f"logit_bias has {len(sampling.logit_bias)} entries; at most "
                f"{model.max_logit_bias} are possible",
                param="logit_bias",
            )
        num_stops = len(sampling.stop_token_ids) + len(model.tokenizer.eos_ids)
        if sampling.min_tokens and num_stops > model.max_stop_token_ids:
            raise RequestError(
                f"min_tokens with {num_stops} stop token ids (the model's own included); at most "
                f"{model.max_stop_token_ids} can be held back",
                param="stop_token_ids",
            )
        for name, ids in (
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            for token_id in ids:
                if token_id >= model.vocab_size:
                    raise RequestError(
                        f"{name} names token {token_id}; the vocabulary ends at "
                        f"{model.vocab_size - 1}",
                        param=name,
                    )
        model.template.check_kwargs(request.template_kwargs)

    def _build(
        self, request: Request, media: Sequence[ReadyMedia], num_choices: int
    ) -> tuple[ExpandedPrompt, tuple[AddRequest, ...]]:
        """Template, placeholders, context check, positions and the engine's messages."""
        model = self.model
        guard = TextGuard(model.tokenizer.special_ids)
        text = model.template.render(
            request.messages,
            guard,
            kwargs=request.template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        prompt = expand(text, [item.tokens for item in media], model.tokenizer, guard)
        max_tokens = self._max_tokens(request, prompt)
        positions, delta = self._positions(prompt, media)
        wire_media = tuple(
            Media(
                kind=item.tokens.kind,
                digest=item.digest,
                grid_thw=item.grid_thw,
                patches=item.patches,
                starts=prompt.starts(index),
            )
            for index, item in enumerate(media)
        )
        seed = request.sampling.seed
        first_seed = secrets.randbits(32) if seed is None else seed
        # Two clients may send the same request id: the engine's are its own.
        engine_id = f"{request.request_id}-{secrets.token_hex(4)}"
        token_ids = np.asarray(prompt.token_ids, np.int32).tobytes()
        adds = tuple(
            AddRequest(
                request_id=f"{engine_id}-{index}",
                token_ids=token_ids,
                positions=positions,
                position_delta=delta,
                media=wire_media,
                sampling=self._sampling(request, max_tokens, (first_seed + index) & 0xFFFFFFFF),
            )
            for index in range(num_choices)
        )
        return prompt, adds

    def _positions(self, prompt: ExpandedPrompt, media: Sequence[ReadyMedia]) -> tuple[bytes, int]:
        """M-RoPE positions and their delta; nothing for text, whose positions are 0..T-1."""
        if self.model.processor is None or not media:
            return b"", 0
        frames = [
            (span.start, media[span.media_index].grid_thw[1], media[span.media_index].grid_thw[2])
            for span in prompt.spans
        ]
        positions_3T, delta = mrope_positions(
            len(prompt.token_ids), frames, self.model.processor.merge_size
        )
        return np.ascontiguousarray(positions_3T, np.int32).tobytes(), int(delta)

    def _max_tokens(self, request: Request, prompt: ExpandedPrompt) -> int:
        """The answer limit, cut to the context that is left."""
        limit, length = self.model.max_model_len, len(prompt.token_ids)
        media = sum(span.num_tokens for span in prompt.spans)
        left = limit - length
        wanted = max(1, request.sampling.min_tokens)
        if left < wanted:
            raise ContextLengthError(
                f"the prompt has {length} tokens ({media} of them for images and videos) and needs "
                f"{wanted} more for the answer; the context is {limit} tokens: shorten the prompt, "
                "send smaller media or raise --max-model-len",
                param="messages",
            )
        asked = request.sampling.max_tokens
        return left if asked is None else min(asked, left)

    def _sampling(self, request: Request, max_tokens: int, seed: int) -> Sampling:
        chosen = request.sampling
        own_stops = () if chosen.ignore_eos else self.model.tokenizer.eos_ids
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=chosen.min_tokens,
            temperature=chosen.temperature,
            top_k=min(chosen.top_k, self.model.vocab_size),
            top_p=chosen.top_p,
            min_p=chosen.min_p,
            seed=seed,
            repetition_penalty=chosen.repetition_penalty,
            presence_penalty=chosen.presence_penalty,
            frequency_penalty=chosen.frequency_penalty,
            logit_bias=tuple(chosen.logit_bias.items()),
            num_logprobs=-1 if chosen.logprobs is None else chosen.logprobs,
            stop_token_ids=tuple(dict.fromkeys((*chosen.stop_token_ids, *own_stops))),
        )


def _count(prompt: ExpandedPrompt, media: Sequence[ReadyMedia]) -> Usage:
    by_kind = {"image": 0, "video": 0}
    for span in prompt.spans:
        by_kind[media[span.media_index].tokens.kind] += span.num_tokens
    return Usage(
        prompt_tokens=len(prompt.token_ids),
        image_tokens=by_kind["image"],
        video_tokens=by_kind["video"],
    )
