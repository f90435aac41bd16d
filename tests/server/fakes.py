"""A server whose engine is a script: the real client, front end and app around canned outputs."""

import asyncio
import base64
import contextlib
import functools
import io
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

import tpu_vl.demo
from tpu_vl.chat.template import ChatTemplate
from tpu_vl.chat.tokenizer import Tokenizer
from tpu_vl.config import EngineConfig, MediaLimits, ProcessorConfig, ServerConfig
from tpu_vl.engine.client import EngineClient
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
from tpu_vl.server.app import create_app
from tpu_vl.server.serve import Server
from tpu_vl.server.state import Capability, LoadedModel, ServerState

FOLDER = Path(tpu_vl.demo.__file__).parent / "checkpoint"
DATA = Path(__file__).parent.parent / "data"
TOKENIZER = Tokenizer(FOLDER)
TEMPLATE = ChatTemplate.from_folder(FOLDER)
EOS = TOKENIZER.eos_ids[0]

Script = Callable[[AddRequest], Iterable[Output]]


def say(text: str, *, per_token_s: float = 0.0) -> Script:
    """A script that answers every request with a text, token by token, then the end token."""

    def script(add: AddRequest) -> Iterator[Output]:
        ids = [*TOKENIZER.encode(text), EOS]
        for index, token_id in enumerate(ids[: add.sampling.max_tokens]):
            time.sleep(per_token_s)
            stopped = token_id in add.sampling.stop_token_ids
            last = index == add.sampling.max_tokens - 1
            yield Output(
                request_id=add.request_id,
                token_ids=(token_id,),
                logprobs=logprobs_of(add, token_id),
                finish_reason="stop" if stopped else "length" if last else None,
                stop_token_id=token_id if stopped else None,
            )

    return script


def logprobs_of(add: AddRequest, *token_ids: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities for a scripted output, when the request asks for them."""
    count = add.sampling.num_logprobs
    if count < 0:
        return ()
    return tuple(
        TokenLogprobs(logprob=-0.5, top=tuple((i + n, -0.5 - n) for n in range(count)))
        for i in token_ids
    )


def endless(add: AddRequest) -> Iterator[Output]:
    """A script that answers until it is aborted."""
    while True:
        time.sleep(0.01)
        yield Output(request_id=add.request_id, token_ids=tuple(TOKENIZER.encode("a")))


class ScriptedEngine:
    """The transport of an engine that plays a script.

    Attributes:
        requests: every request that arrived.
        aborted: ids that were aborted.
        open: ids that have not ended.
        has_ended: whether it was told to end, and did.
    """

    def __init__(self, script: Script) -> None:
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[list[FromEngine]] = queue.SimpleQueue()
        self.script = script
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []
        self.open: dict[str, Iterator[Output]] = {}
        self.has_ended = False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while True:
            for message in self._arrived():
                if isinstance(message, Shutdown):
                    self.outbox.put([Dead(reason="shut down")])
                    self.has_ended = True
                    return
                if isinstance(message, Abort):
                    self.aborted.append(message.request_id)
                    self.open.pop(message.request_id, None)
                else:
                    self.requests.append(message)
                    self.open[message.request_id] = iter(self.script(message))
            outputs: list[FromEngine] = []
            for request_id, script in list(self.open.items()):
                output = next(script, None)
                if output is None:
                    del self.open[request_id]
                    continue
                outputs.append(output)
                if output.finish_reason is not None:
                    del self.open[request_id]
            self.outbox.put([*outputs, Stats(running=len(self.open), kv_usage=0.25)])

    def _arrived(self) -> Iterator[ToEngine]:
        if not self.open:
            yield self.inbox.get()
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.inbox.get_nowait()


def loaded_model(engine: ScriptedEngine, **changes: object) -> LoadedModel:
    """A model of the bundled tokenizer and template in front of a scripted engine."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_num_queued_reqs=24,
        page_size=16,
        num_pages=256,
        token_capacities=(64,),
    )
    client = EngineClient(engine, config)
    fields: dict = {
        "root": "bundled",
        "tokenizer": TOKENIZER,
        "template": TEMPLATE,
        "capability": Capability(modalities=("image", "video")),
        "processor": ProcessorConfig(
            image_min_pixels=1024,
            image_max_pixels=512 * 512,
            video_max_pixels=2048 * 1024,
            video_max_frames=16,
        ),
        "limits": MediaLimits(
            max_images=16, max_videos=2, max_video_frames=32, fetch_timeout_s=1.0
        ),
        "client": client,
        "max_model_len": config.max_model_len,
        "vocab_size": TOKENIZER.vocab_size,
        "max_logit_bias": 300,
        "max_stop_token_ids": 16,
        "max_open_requests": config.max_num_seqs + config.max_num_queued_reqs,
        "page_size": config.page_size,
        "num_pages": config.num_pages,
        "compiles_after_ready": lambda: 0,
        "close": client.shutdown,
    }
    return LoadedModel(**{**fields, **changes})


def server_config(**changes: object) -> ServerConfig:
    """Small limits, one worker."""
    fields: dict = {
        "served_model_names": ("tiny", "alias"),
        "num_preprocess_workers": 2,
        "max_request_bytes": 8 << 20,
        "preprocess_bytes": 64 << 20,
    }
    return ServerConfig(**{**fields, **changes})


class App:
    """An application in this process, and the engine behind it."""

    def __init__(self, engine: ScriptedEngine, state: ServerState, config: ServerConfig) -> None:
        self.engine = engine
        self.state = state
        self.asgi = create_app(state, config)
        transport = httpx.ASGITransport(self.asgi)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://server")

    @property
    def frontend(self):
        return self.asgi.state.routes.frontend()

    async def chat(self, body: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
        """Posts a chat completion; the default message is one word."""
        given = body or {"messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=given)

    async def text(self, *parts: object, **fields: object) -> httpx.Response:
        """Posts one user turn of content parts."""
        turn = {"role": "user", "content": list(parts)}
        return await self.chat({"messages": [turn], **fields})

    @property
    def client(self) -> EngineClient:
        """The client of the engine, once the model is ready."""
        assert self.state.model is not None
        return self.state.model.client

    def nothing_held(self) -> bool:
        """Whether every count is back at its start."""
        held = self.frontend.held_bytes or self.frontend.num_open
        return not held and not self.engine.open


@contextlib.asynccontextmanager
async def serving(
    script: Script, config: ServerConfig | None = None, **changes: object
) -> AsyncIterator[App]:
    """An application that is ready, and its end."""
    engine, state = ScriptedEngine(script), ServerState()
    app = App(engine, state, config or server_config())
    model = loaded_model(engine, **changes)
    model.client.start(asyncio.get_running_loop())
    state.ready(model)
    try:
        yield app
    finally:
        await app.http.aclose()
        app.frontend.close()
        await asyncio.to_thread(model.close)


@contextlib.contextmanager
def listening(script: Script, **changes: object) -> Iterator[tuple[str, ScriptedEngine, Server]]:
    """A real server on a free port of this machine: its address, its engine, itself."""
    engine = ScriptedEngine(script)
    config = server_config(port=free_port(), max_request_bytes=32 << 20)
    server = Server(config, lambda _: loaded_model(engine, **changes), drain_s=2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started and server.state.model is not None, 20)
    try:
        yield f"http://127.0.0.1:{config.port}", engine, server
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def in_loop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test in an event loop of its own."""

    @functools.wraps(scenario)
    def test(*args: object, **kwargs: object) -> None:
        asyncio.run(scenario(*args, **kwargs))

    return test


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(done: Callable[[], bool], limit_s: float = 5) -> None:
    """Waits for a condition.

    Raises:
        TimeoutError: it did not hold in time.
    """
    end_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not so within {limit_s} s")
        time.sleep(0.01)


def png(width: int = 64, height: int = 64, colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    """A picture of one colour."""
    out = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), colour, np.uint8)).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """A base64 data: address."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes | None = None, media_type: str = "image/png") -> dict:
    """A content part with a picture."""
    url = data_url(png() if data is None else data, media_type)
    return {"type": "image_url", "image_url": {"url": url}}


def frames_part(num_frames: int = 4, size: int = 64) -> dict:
    """A content part with a video given as frames."""
    urls = [data_url(png(size, size, (40 * i % 255, 10, 10))) for i in range(num_frames)]
    return {"type": "video", "video": urls}


def text_part(text: str) -> dict:
    """A content part with text."""
    return {"type": "text", "text": text}
