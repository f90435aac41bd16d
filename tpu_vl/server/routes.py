"""The endpoints: chat completions, models, health, version and metrics."""

import asyncio
import importlib.metadata
import json
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from tpu_vl.config import ServerConfig
from tpu_vl.errors import EngineDeadError, ModelNotFoundError, NotReadyError, RequestError
from tpu_vl.server.chat import parse_chat
from tpu_vl.server.chat_output import ChatWriter
from tpu_vl.server.fields import shown
from tpu_vl.server.frontend import Frontend
from tpu_vl.server.metrics import Metrics
from tpu_vl.server.problem import error_object
from tpu_vl.server.state import LoadedModel, ServerState
from tpu_vl.server.streams import ClientGoneError, EventStream, unless_gone

_LARGE_BODY_BYTES = 1 << 20
_RETRY_AFTER_S = 5


class Routes:
    """The endpoints of one server.

    Args:
        state: loading progress and the model.
        config: names and limits.
    """

    def __init__(self, state: ServerState, config: ServerConfig) -> None:
        self._state = state
        self._config = config
        self._created = int(time.time())
        self._version = _version()
        self.metrics = Metrics(config.served_model_names[0], state)
        self._frontend: Frontend | None = None
        self.router = APIRouter()
        for path, method, endpoint in (
            ("/v1/chat/completions", "POST", self.chat_completions),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{model_id:path}", "GET", self.model),
            ("/health", "GET", self.health),
            ("/live", "GET", self.live),
            ("/version", "GET", self.version),
            ("/metrics", "GET", self.scrape),
        ):
            self.router.add_api_route(path, endpoint, methods=[method])

    def frontend(self) -> Frontend:
        """The front end of the loaded model.

        Raises:
            NotReadyError: loading is not done, or the server is ending.
        """
        model = self._ready_model()
        if self._frontend is None:
            self._frontend = Frontend(model, self._config, self.metrics)
        return self._frontend

    def close(self) -> None:
        """Ends the preprocessing threads."""
        if self._frontend is not None:
            self._frontend.close()

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        frontend = self.frontend()
        call = parse_chat(
            await _read_json(request),
            self._config.generation_defaults,
            request.headers.get("x-request-id"),
        )
        self._check_model(call.model)
        prepared = await unless_gone(
            request.receive, frontend.prepare(call.request, call.num_choices)
        )
        writer = ChatWriter(
            call,
            prepared,
            model_name=call.model or self._config.served_model_names[0],
            fingerprint=f"tpu-vl-{self._version}",
            tokenizer=frontend.model.tokenizer,
        )
        events = frontend.answer(prepared)
        if call.stream:
            return EventStream(writer.chunks(events), prepared.close)
        try:
            return JSONResponse(await unless_gone(request.receive, writer.whole(events)))
        finally:
            await events.aclose()
            prepared.close()

    async def models(self) -> Response:
        """GET /v1/models."""
        model = self._ready_model()
        cards = [self._card(name, model) for name in self._config.served_model_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, model_id: str) -> Response:
        """GET /v1/models/{id}."""
        self._check_model(model_id)
        return JSONResponse(self._card(model_id, self._ready_model()))

    async def health(self) -> Response:
        """GET /health: 200 when requests can be answered, else 503 with how far loading is."""
        try:
            model = self._ready_model()
        except NotReadyError as error:
            body = error_object(error)[1]
            retry = {"Retry-After": str(error.retry_after_s)}
            return JSONResponse({**body, **self._progress()}, status_code=503, headers=retry)
        if model.client.dead is not None:
            error = EngineDeadError("the engine has ended; the server must be restarted")
            return JSONResponse({**error_object(error)[1], "status": "dead"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def live(self) -> Response:
        """GET /live: 200 as long as a restart would not help."""
        model = self._state.model
        dead = model is not None and model.client.dead is not None
        failed = dead or self._state.failure is not None
        status = "dead" if failed else "alive"
        return JSONResponse({"status": status}, status_code=500 if failed else 200)

    async def version(self) -> Response:
        """GET /version."""
        return JSONResponse({"version": self._version})

    async def scrape(self) -> Response:
        """GET /metrics."""
        return Response(
            self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _ready_model(self) -> LoadedModel:
        if self._state.model is None or self._state.draining:
            progress = self._state.progress
            what = "ending" if self._state.draining else f"loading ({progress.phase})"
            raise NotReadyError(
                f"the server is {what}; send the request again later", retry_after_s=_RETRY_AFTER_S
            )
        return self._state.model

    def _progress(self) -> dict[str, Any]:
        progress = self._state.progress
        return {
            "status": "draining" if self._state.draining else "loading",
            "phase": progress.phase,
            "done": progress.done,
            "total": progress.total,
        }

    def _check_model(self, name: str | None) -> None:
        names = self._config.served_model_names
        if name is not None and name not in names:
            raise ModelNotFoundError(
                f"the model {shown(name)} is not served; served: {', '.join(names)}", param="model"
            )

    def _card(self, name: str, model: LoadedModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tpu-vl",
            "root": model.root,
            "parent": None,
            "max_model_len": model.max_model_len,
            "modalities": ["text", *model.capability.modalities],
            "notice": self._config.notice,
        }


def _version() -> str:
    try:
        return importlib.metadata.version("tpu-vl")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"  # run from a checkout that is not installed


async def _read_json(request: Request) -> object:
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGoneError from None
    if len(body) > _LARGE_BODY_BYTES:
        return await asyncio.to_thread(_parse_json, body)
    return _parse_json(body)


def _parse_json(body: bytes) -> object:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        # The decoder's own text names a position; it never quotes the body.
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "not UTF-8 JSON"
        raise RequestError(f"the body is not valid JSON: {reason}") from None


def _refuse_constant(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is not JSON", "", 0)
