"""The bundled model behind the real server, in this process, so that its insides can be checked."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.media import Pool
from tpu_vl import launch, prepare
from tpu_vl.engine.engine import EngineThread
from tpu_vl.engine.scheduler import Scheduler
from tpu_vl.flags import ServeFlags
from tpu_vl.server.frontend import Frontend
from tpu_vl.server.serve import Server
from tpu_vl.spawn import free_port


@dataclass(frozen=True)
class Served:
    """A running server and its insides.

    Args:
        base_url: of the server.
        server: the uvicorn server, with its state.
        scheduler: of the engine behind it.
    """

    base_url: str
    server: Server
    scheduler: Scheduler

    @property
    def frontend(self) -> Frontend:
        """The front end of the loaded model."""
        return self.server.config.app.state.routes.frontend()  # pyright: ignore

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Waits until nothing is held, and fails with what still is."""
        deadline = time.monotonic() + timeout_s
        while held := self.held():
            assert time.monotonic() < deadline, held
            time.sleep(0.02)
        self.scheduler.check_integrity()

    def held(self) -> dict[str, int]:
        """What unfinished requests hold; empty when idle."""
        config = self.scheduler.pages
        counts = {
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "pages": config.num_pages - config.num_free,
            "pinned rows": self.scheduler.cache.num_pinned_rows,
            "host bytes": self.frontend.held_bytes,
        }
        return {name: count for name, count in counts.items() if count}


def serve_in_thread(flags: ServeFlags) -> tuple[Served, threading.Thread]:
    """Starts the server of these flags and waits until it is ready."""
    plan = launch.make_plan(flags)
    config = launch.server_config(flags, plan)
    store = prepare.open_store(plan, flags)
    server = Server(
        config,
        lambda state: launch.load(flags, plan, store, state),
        drain_s=flags.shutdown_timeout_s,
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 500
    while server.state.model is None:
        assert server.state.failure is None, server.state.failure
        assert time.monotonic() < deadline
        time.sleep(0.05)
    transport = server.state.model.client._transport
    assert isinstance(transport, EngineThread)
    base_url = f"http://{config.host}:{config.port}"
    return Served(base_url, server, transport._engine.scheduler), thread


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's executables are kept."""
    return tmp_path_factory.mktemp("executables")


@pytest.fixture(scope="session")
def flags(store_folder: Path) -> ServeFlags:
    """The bundled model with small limits, so that budgets are reached."""
    return ServeFlags(
        port=free_port(),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        max_frame_patches=1024,
        executables=str(store_folder),
    )


@pytest.fixture(scope="session")
def served(flags: ServeFlags) -> Iterator[Served]:
    """The server of these flags, for the whole session."""
    served, thread = serve_in_thread(flags)
    yield served
    served.server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    """An HTTP client of the server; whatever a test did, nothing may stay held."""
    with httpx.Client(base_url=served.base_url, timeout=300) as http:
        yield http
    served.wait_idle()


@pytest.fixture(scope="session")
def media() -> Pool:
    """Seeded pictures and videos of many sizes, as data: URLs."""
    return Pool(seed=7)
