"""Clients that hang up, on a real socket: generation ends and everything is given back."""

import json
import socket
import threading

import httpx
import pytest

from tests.server.fakes import (
    data_url,
    endless,
    image_part,
    listening,
    png,
    say,
    text_part,
    wait_until,
)
from tpu_vl.config import MediaLimits
from tpu_vl.vision import process


def body(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def hang_up(url, request, when):
    """Sends a request and closes the socket once `when()` holds."""
    data = json.dumps(request).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + data)
        wait_until(when, 10)


def leave_stream(url, request):
    """Reads the first event of a stream, then closes the socket."""
    with (
        httpx.Client(timeout=5) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=request) as response,
    ):
        assert next(response.iter_lines()).startswith("data: ")


def check_free(engine, server, num_aborted):
    frontend = server.app.state.routes.frontend()
    wait_until(lambda: not frontend.num_open and not frontend.held_bytes)
    wait_until(lambda: not engine.open)
    assert len(engine.aborted) == num_aborted


@pytest.fixture(scope="module")
def endless_server():
    with listening(endless) as server:
        yield server


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_hanging_up_during_the_answer(endless_server, stream, n):
    url, engine, server = endless_server
    before = len(engine.aborted)
    request = body(image_part(), text_part("x"), n=n, stream=stream)
    if stream:
        leave_stream(url, request)
    else:
        hang_up(url, request, lambda: len(engine.open) == n)
    check_free(engine, server, before + n)
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} '
    metrics = httpx.get(f"{url}/metrics").text
    assert float(metrics.split(aborted)[1].split()[0]) == before + n


def test_hanging_up_during_preprocessing(monkeypatch):
    running, go_on = threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        running.set()
        go_on.wait(10)
        return process.process_image(*args, **kwargs)

    monkeypatch.setattr("tpu_vl.server.preprocess.process_image", slow)
    with listening(say("a")) as (url, engine, server):
        hang_up(url, body(image_part(), image_part(), image_part()), running.is_set)
        frontend = server.app.state.routes.frontend()
        wait_until(lambda: not frontend.num_open)
        assert frontend.held_bytes > 0  # the threads still work on it
        go_on.set()
        check_free(engine, server, 0)
        assert not engine.requests
        assert httpx.post(f"{url}/v1/chat/completions", json=body(text_part("x"))).is_success


def test_hanging_up_during_a_download_and_a_stuck_host_delays_nobody():
    limits = MediaLimits(allow_private_addresses=True, fetch_timeout_s=20)
    with (
        listening(say("a"), limits=limits) as (url, engine, server),
        socket.create_server(("127.0.0.1", 0)) as stuck,
    ):
        address = f"http://127.0.0.1:{stuck.getsockname()[1]}/a.png"
        part = {"type": "image_url", "image_url": {"url": address}}
        answered = threading.Event()
        thread = threading.Thread(target=hang_up, args=(url, body(part), answered.is_set))
        thread.start()
        frontend = server.app.state.routes.frontend()
        wait_until(lambda: frontend.num_open == 1)
        waiting = httpx.get(f"{url}/metrics").text
        assert 'num_requests_waiting{engine="0",model_name="tiny"} 1.0' in waiting
        assert httpx.post(f"{url}/v1/chat/completions", json=body(text_part("x"))).is_success
        assert frontend.num_open == 1  # the other one still waits for its host
        answered.set()
        thread.join()
        check_free(engine, server, 0)


def test_distinct_pictures_leave_no_bytes_behind():
    with listening(say("a")) as (url, engine, server), httpx.Client(timeout=5) as client:
        for i in range(60):
            url_of = data_url(png(64, 64, (i, 2 * i, 3 * i)))
            part = {"type": "image_url", "image_url": {"url": url_of}}
            assert client.post(f"{url}/v1/chat/completions", json=body(part)).is_success
        check_free(engine, server, 0)
