"""The asyncio side of the engine: what a front end holds instead of the engine itself."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from typing import Protocol

from tpu_vl.config import EngineConfig
from tpu_vl.engine.messages import (
    Abort,
    AddRequest,
    Dead,
    FromEngine,
    Output,
    Shutdown,
    Stats,
    ToEngine,
)
from tpu_vl.errors import EngineDeadError, OverloadedError, TpuVlError


class Transport(Protocol):
    """Where messages go to and come from; `engine.EngineThread` is one."""

    inbox: "queue.SimpleQueue[ToEngine]"
    outbox: "queue.SimpleQueue[list[FromEngine]]"

    def start(self) -> None:
        """Starts the loop behind the queues."""
        ...

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for that loop's end."""
        ...


class EngineClient:
    """Sends requests to an engine and hands each its own outputs. Use from one asyncio loop.

    Args:
        stats: the engine's latest state.
        dead: why the engine ended; None while it runs.
    """

    def __init__(self, transport: Transport, engine_config: EngineConfig) -> None:
        self.stats = Stats()
        self.dead: str | None = None
        self._transport = transport
        self._capacity = engine_config.max_num_seqs + engine_config.max_num_queued_reqs
        self._outputs: dict[str, asyncio.Queue[Output]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump = threading.Thread(target=self._forward, name="engine-outputs", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the engine's loop; outputs are delivered in `loop`."""
        self._loop = loop
        self._transport.start()
        self._pump.start()

    @property
    def queue_full(self) -> bool:
        """As many requests are open as may run and wait: refuse the next with 503."""
        return len(self._outputs) >= self._capacity

    async def generate(self, request: AddRequest) -> AsyncIterator[Output]:
        """Yields a request's outputs up to the one with a finish reason.

        Closing the iterator early aborts the request.

        Args:
            request: its id is not open already.

        Raises:
            EngineDeadError: the engine has ended; restart the process.
            OverloadedError: `queue_full`; try again later or raise --max-num-queued-reqs.
        """
        if self.dead is not None:
            raise EngineDeadError(f"{self.dead}; restart the server")
        if self.queue_full:
            raise OverloadedError(
                f"{len(self._outputs)} requests are open, the limit is {self._capacity}; try "
                "again later or raise --max-num-queued-reqs"
            )
        if request.request_id in self._outputs:
            raise TpuVlError(f"request id {request.request_id!r} is already open")
        outputs = self._outputs[request.request_id] = asyncio.Queue()
        self._transport.inbox.put(request)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self._transport.inbox.put(Abort(request_id=request.request_id))
            self._outputs.pop(request.request_id, None)

    def abort(self, request_id: str) -> None:
        """Ends a request; its iterator yields a last output with finish reason "abort"."""
        self._transport.inbox.put(Abort(request_id=request_id))

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Ends the engine's loop after its current step; open requests end with an error."""
        self._transport.inbox.put(Shutdown())
        self._transport.join(timeout_s)
        self._pump.join(timeout_s)

    def _forward(self) -> None:
        """Carries messages from the engine's queue into the asyncio loop (own thread)."""
        assert self._loop is not None
        ended = False
        while not ended:
            messages = self._transport.outbox.get()
            ended = isinstance(messages[-1], Dead)
            if self._loop.is_closed():
                continue
            self._loop.call_soon_threadsafe(self._deliver, messages)

    def _deliver(self, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, Output):
                outputs = self._outputs.get(message.request_id)
                if outputs is not None:
                    outputs.put_nowait(message)
            elif isinstance(message, Stats):
                self.stats = message
            else:
                self._die(message.reason)

    def _die(self, reason: str) -> None:
        self.dead = reason
        for request_id, outputs in self._outputs.items():
            outputs.put_nowait(Output(request_id=request_id, finish_reason="error", error=reason))
