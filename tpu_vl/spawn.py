"""A server in a process of its own, for commands that need one beside them."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from tpu_vl.errors import ConfigError

_POLL_S = 0.2


def free_port() -> int:
    """A TCP port on the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_server(
    arguments: Sequence[str],
    *,
    port: int = 0,
    ready_timeout_s: float = 600.0,
    log: IO[str] | None = None,
) -> Iterator[str]:
    """Runs `tpu-vl serve` on the loopback address until the block ends.

    Args:
        arguments: flags of `serve`, without host and port.
        port: to listen on; 0 takes a free one.
        ready_timeout_s: limit for loading and compiling, in seconds.
        log: file for the server's log; None: this process's stderr.

    Yields:
        The base URL, such as http://127.0.0.1:8000, once /health is 200.

    Raises:
        ConfigError: the server ended or was not ready in time; its log says why.
    """
    port = port or free_port()
    base_url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tpu_vl.cli", "serve", *arguments]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stderr=log)
    try:
        _wait_ready(process, base_url, ready_timeout_s)
        yield base_url
    finally:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], base_url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended with exit code {process.returncode}; see its log")
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=5) as answer:
                json.load(answer)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    raise ConfigError(f"the server was not ready after {timeout_s:.0f} s; see its log")
