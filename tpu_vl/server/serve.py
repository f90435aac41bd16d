"""Runs the server: its port answers while the model loads, and requests end before it does.

The life of a server, in order:
1. `run_server` binds the port. Every endpoint answers; /health and /v1/* say 503 with progress.
2. A thread calls `load(state)`, which reports phases to `state` and returns a `LoadedModel`.
3. On the event loop, `model.client.start(loop)` connects the engine, then `state.ready(model)`
   opens the server. If `load` raises, the server stops and `run_server` raises that error.
4. SIGTERM or SIGINT: `state.draining` is set, so /health and new requests get 503; running answers
   go on until they end or `drain_s` is over.
5. Open requests are gone: preprocessing threads end, then `model.close()` ends the engine.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from fastapi import FastAPI

from tpu_vl.config import ServerConfig
from tpu_vl.errors import ConfigError
from tpu_vl.server.app import create_app
from tpu_vl.server.state import LoadedModel, ServerState

logger = logging.getLogger("tpu_vl.server")

# Threads for name resolution, JSON, base64 and templates: they wait more than they work.
_NUM_HELPER_THREADS = 32

Load = Callable[[ServerState], LoadedModel]


class Server(uvicorn.Server):
    """A uvicorn server that loads its model in the background and drains before it ends.

    Args:
        config: address and limits.
        load: makes the model; runs in a thread.
        drain_s: longest wait for running answers at the end, in seconds.
    """

    def __init__(self, config: ServerConfig, load: Load, *, drain_s: int) -> None:
        self.state = ServerState()
        self._load = load
        self.app = create_app(self.state, config)
        self.app.router.lifespan_context = self._lifespan
        super().__init__(
            uvicorn.Config(
                self.app,
                host=config.host,
                port=config.port,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=drain_s,
                lifespan="on",
            )
        )

    def handle_exit(self, sig: int, frame: object) -> None:
        """Stops taking requests; a second SIGINT ends the process without waiting."""
        self.state.draining = True
        super().handle_exit(sig, frame)  # pyright: ignore[reportArgumentType]

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        helpers = ThreadPoolExecutor(_NUM_HELPER_THREADS, thread_name_prefix="helper")
        loop.set_default_executor(helpers)
        # A daemon: loading cannot be interrupted, and must not keep an ending process alive.
        threading.Thread(target=self._run_load, args=(loop,), daemon=True, name="load").start()
        try:
            yield
        finally:
            self.state.draining = True
            app.state.routes.close()
            if self.state.model is not None:
                await asyncio.to_thread(self.state.model.close)

    def _run_load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            model = self._load(self.state)
        except BaseException as error:
            self._on_loop(loop, self._fail, error)
        else:
            if not self._on_loop(loop, self._open, loop, model):
                model.close()

    def _on_loop(self, loop: asyncio.AbstractEventLoop, call: Callable, *args: object) -> bool:
        """Calls on the event loop; False when it has already ended."""
        try:
            loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    def _open(self, loop: asyncio.AbstractEventLoop, model: LoadedModel) -> None:
        model.client.start(loop)
        self.state.ready(model)
        logger.info("ready")

    def _fail(self, error: BaseException) -> None:
        self.state.failure = error
        self.should_exit = True


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family, backlog=2048)


def run_server(config: ServerConfig, load: Load, *, drain_s: int) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        config: address and limits.
        load: makes the model; reports its phases to the state it is given.
        drain_s: longest wait for running answers at the end, in seconds.

    Raises:
        ConfigError: the address cannot be listened on; change --host or --port.
        Exception: what `load` raised.
    """
    server = Server(config, load, drain_s=drain_s)
    try:
        listener = _listen(config)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}; change --host or --port"
        ) from error
    logger.info("listening on http://%s:%d", config.host, listener.getsockname()[1])
    server.run(sockets=[listener])
    if server.state.failure is not None:
        raise server.state.failure
