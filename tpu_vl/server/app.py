"""The ASGI application: limits, keys and error shape around every route."""

import contextlib
import hmac
import secrets

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpu_vl.config import ServerConfig
from tpu_vl.errors import AuthenticationError, PayloadTooLargeError, TpuVlError
from tpu_vl.server.problem import error_response
from tpu_vl.server.routes import Routes
from tpu_vl.server.state import ServerState
from tpu_vl.server.streams import ClientGoneError


def create_app(state: ServerState, config: ServerConfig) -> FastAPI:
    """The application; it answers 503 with progress until `state.model` is set.

    Args:
        state: written by the loading thread.
        config: limits, key and names.
    """
    app = FastAPI(title="tpu-vl", docs_url=None, redoc_url=None, openapi_url=None)
    routes = Routes(state, config)
    app.include_router(routes.router)
    app.add_exception_handler(HTTPException, _handle)
    app.add_exception_handler(TpuVlError, _handle)
    app.add_middleware(Edge, config=config)
    app.state.routes = routes
    return app


async def _handle(_request: Request, error: Exception) -> Response:
    return error_response(error)


class Edge:
    """The outermost layer: request id, body limit, API key, and no error without its shape.

    Args:
        app: what it wraps.
        config: `max_request_bytes` and `api_key`.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get(b"x-request-id", secrets.token_hex(12))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                pair = (b"x-request-id", request_id.encode("latin-1"))
                message = {**message, "headers": [*message.get("headers", []), pair]}
            await send(message)

        try:
            self._check(scope, headers)
            limited = _Limited(receive, self._config.max_request_bytes)
            await self._app(scope, limited.receive, send_with_id)
        except Exception as error:
            if started:
                raise
            response = (
                Response(status_code=499)
                if isinstance(error, ClientGoneError)
                else error_response(error)
            )
            with contextlib.suppress(OSError):
                await response(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> None:
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_request_bytes:
            raise _too_large(self._config.max_request_bytes)
        key = self._config.api_key
        if key is None or not scope["path"].startswith("/v1/"):
            return
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise AuthenticationError(
                "the API key is missing or wrong; send Authorization: Bearer <key>"
            )


class _Limited:
    """Counts a body as it arrives: its length header may be missing or wrong."""

    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit_bytes:
            raise _too_large(self._limit_bytes)
        return message


def _too_large(limit_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the request body is over {limit_bytes} bytes; send smaller media or raise "
        "--max-request-mb"
    )
