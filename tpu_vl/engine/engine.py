"""The loop that owns all mutation: messages in, one step, messages out."""

import logging
import queue
import threading
from dataclasses import dataclass

import jax
import numpy as np

from tpu_vl.config import EngineConfig
from tpu_vl.engine.batch import Batch, build_batch, build_call
from tpu_vl.engine.messages import (
    Abort,
    AddRequest,
    Dead,
    FromEngine,
    Output,
    Shutdown,
    Stats,
    ToEngine,
    TokenLogprobs,
)
from tpu_vl.engine.runner import PlacedCall, Runner
from tpu_vl.engine.sampling import SampleOutputs
from tpu_vl.engine.scheduler import Scheduler, Step
from tpu_vl.engine.sequence import Sequence, make_sequence
from tpu_vl.engine.tower import TowerSlice
from tpu_vl.errors import IntegrityError, TpuVlError
from tpu_vl.models.family import VisionGeometry
from tpu_vl.types import FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _InFlight:
    """A dispatched batch whose tokens have not been read."""

    batch: Batch
    outputs: SampleOutputs


class Engine:
    """One model on one group of devices, asynchronous by one step.

    The text program of a step is dispatched before the tokens of the step before are read: a
    sequence that those tokens end has computed one token too many, which is dropped.
    """

    def __init__(
        self,
        runner: Runner,
        engine_config: EngineConfig,
        *,
        geometry: VisionGeometry | None,
        vocab_size: int,
    ) -> None:
        """Args:
        runner: has every program of the config in its table.
        engine_config: sizes and limits.
        geometry: of the tower; None in a text-only process.
        vocab_size: of the model.
        """
        self._runner = runner
        self._config = engine_config
        self._geometry = geometry
        self._vocab_size = vocab_size
        self.scheduler = Scheduler(engine_config, geometry)
        self._open: dict[str, Sequence] = {}
        self._in_flight: _InFlight | None = None
        self._placed: PlacedCall | None = None
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return bool(self._open) or self._in_flight is not None or self.scheduler.tower.busy

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of requests that have not ended."""
        return tuple(self._open)

    def handle(self, message: AddRequest | Abort) -> list[Output]:
        """Takes a message; a request that cannot be served ends here with an error."""
        if isinstance(message, Abort):
            return self._abort(message.request_id)
        if message.request_id in self._open:
            return [_failed(message.request_id, f"request {message.request_id!r} is already open")]
        try:
            seq = make_sequence(
                message,
                self._num_arrivals,
                engine_config=self._config,
                geometry=self._geometry,
                vocab_size=self._vocab_size,
            )
        except TpuVlError as error:
            return [_failed(message.request_id, error.message)]
        except (ValueError, TypeError, OverflowError) as error:
            return [_failed(message.request_id, f"the request is malformed: {error}")]
        self._num_arrivals += 1
        self._open[seq.request_id] = seq
        self.scheduler.add(seq)
        return []

    def _abort(self, request_id: str) -> list[Output]:
        seq = self._open.pop(request_id, None)
        if seq is None:
            return []
        self.scheduler.end(seq)
        return [Output(request_id=request_id, finish_reason="abort")]

    def step(self) -> list[Output]:
        """Schedules and dispatches one step, then reads the tokens of the step before."""
        step = self.scheduler.schedule()
        self._check_progress(step)
        dispatched = self._dispatch(step)
        read, self._in_flight = self._in_flight, dispatched
        outputs = self._read(read) if read else []
        self._num_steps += bool(step.rows or step.slices)
        return outputs

    def _check_progress(self, step: Step) -> None:
        if self._open and not (step.rows or step.slices or self._in_flight):
            raise IntegrityError(
                f"{len(self.scheduler.running)} running and {len(self.scheduler.waiting)} waiting "
                "requests, but nothing can be scheduled"
            )

    def _dispatch(self, step: Step) -> _InFlight | None:
        for tower_slice in step.slices:
            self._encode(tower_slice)
        if not step.rows:
            if step.slices:
                # Nothing of this step will be read: without a wait, the tower would be queued far
                # ahead of the next request's tokens.
                self._runner.wait()
            return None
        batch = build_batch(step.rows, self._config)
        hidden_RD = self._runner.text(batch)
        if batch.sample is None:
            return None
        return _InFlight(batch, self._runner.sample(batch, hidden_RD))

    def _encode(self, tower_slice: TowerSlice) -> None:
        """Runs a slice; the call's inputs are sent with its first and dropped with its last."""
        assert self._geometry is not None
        if tower_slice.first_layer == 0:
            self._placed = self._runner.place(*build_call(tower_slice.call, self._geometry))
        assert self._placed is not None
        self._runner.encode(self._placed, tower_slice.first_layer, tower_slice.end_layer)
        if tower_slice.end_layer == self._geometry.depth:
            self._placed = None

    def _read(self, flight: _InFlight) -> list[Output]:
        token_R = np.asarray(flight.outputs.token_R)
        tops = jax.device_get(flight.outputs) if flight.batch.wants_logprobs else None
        outputs: list[Output] = []
        for row, seq in enumerate(flight.batch.sampled):
            seq.num_pending -= 1
            if not seq.finished:
                outputs.append(self._answer(seq, int(token_R[row]), tops, row))
        return outputs

    def _answer(self, seq: Sequence, token: int, tops: SampleOutputs | None, row: int) -> Output:
        if token < 0:
            self._end(seq)
            return _failed(seq.request_id, "the model gave logits that are not finite")
        seq.answer.append(token)
        reason: FinishReason | None = None
        stopped = token in seq.sampling.stop_token_ids
        if stopped:
            reason = "stop"
        elif len(seq.answer) >= seq.sampling.max_tokens:
            reason = "length"
        if reason:
            self._end(seq)
        num_tops = seq.sampling.num_logprobs
        return Output(
            request_id=seq.request_id,
            token_ids=(token,),
            logprobs=(_logprobs(tops, row, num_tops),) if tops and num_tops >= 0 else (),
            finish_reason=reason,
            stop_token_id=token if stopped else None,
        )

    def _end(self, seq: Sequence) -> None:
        self.scheduler.end(seq)
        del self._open[seq.request_id]

    def stats(self) -> Stats:
        """Gauges and totals for /metrics."""
        scheduler, tower = self.scheduler, self.scheduler.tower
        used_pages = self._config.num_pages - scheduler.pages.num_free
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=used_pages / self._config.num_pages,
            pool_usage=scheduler.cache.num_pinned_rows / max(1, self._config.pool_rows),
            preemptions_total=scheduler.num_preemptions,
            steps_total=self._num_steps,
            frames_encoded_total=tower.num_frames,
            patches_encoded_total=tower.num_patches,
            patches_padded_total=tower.num_padding_patches,
            encoder_calls_total=tower.num_calls,
            media_cache_queries_total=scheduler.num_frame_queries,
            media_cache_hits_total=scheduler.num_frame_hits,
        )


def _logprobs(outputs: SampleOutputs, row: int, num_tops: int) -> TokenLogprobs:
    ids, values = outputs.top_token_RA[row][:num_tops], outputs.top_logprob_RA[row][:num_tops]
    return TokenLogprobs(
        logprob=float(outputs.logprob_R[row]),
        top=tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True)),
    )


def _failed(request_id: str, error: str) -> Output:
    return Output(request_id=request_id, finish_reason="error", error=error)


class EngineThread:
    """Runs an engine's loop in a thread; only messages cross, through two queues.

    `inbox` takes `ToEngine` messages, `outbox` gives lists of `FromEngine` messages, one list per
    step. The loop sleeps on the inbox while there is nothing to do.
    """

    def __init__(self, engine: Engine) -> None:
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[list[FromEngine]] = queue.SimpleQueue()
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the loop to end, after Shutdown or a failure."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            while self._drain():
                if self._engine.has_work:
                    outputs = self._engine.step()
                    self.outbox.put([*outputs, self._engine.stats()])
        except Exception as error:
            log.exception("the engine's loop failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
        still_open = [_failed(request_id, reason) for request_id in self._engine.open_requests]
        self.outbox.put([*still_open, Dead(reason=reason)])

    def _drain(self) -> bool:
        """Handles every message that is there, blocking while idle; False: time to end."""
        while True:
            try:
                message = self.inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if isinstance(message, Shutdown):
                return False
            outputs = self._engine.handle(message)
            if outputs:
                self.outbox.put([*outputs, self._engine.stats()])
