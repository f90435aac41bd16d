"""Work that ends when its client hangs up: whole answers and event streams."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpu_vl.server.problem import error_event

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client hung up: nobody reads an answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`; cancels it, and waits for its end, when the client hangs up.

    Args:
        receive: of a request whose body has been read.
        work: what the client waits for.

    Raises:
        ClientGoneError: the client hung up first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for item in (task, watcher):
            item.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of a generator that is always closed: at its end or at a hang-up.

    Args:
        events: texts of whole events; an error it raises becomes an `error` event, the last.
        close: called after the generator is closed, also when it never ran.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        close: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or the client is gone."""
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            return
        finally:
            await self._events.aclose()
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for text in self._events:
                await self._send(send, text)
        except OSError:
            raise
        except Exception as error:
            await self._send(send, error_event(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
