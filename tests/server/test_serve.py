"""The life of a server: loading, ready, draining, failing; and the official client against it."""

import signal
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest

from tests.server.fakes import (
    ScriptedEngine,
    frames_part,
    free_port,
    image_part,
    listening,
    loaded_model,
    say,
    server_config,
    text_part,
    wait_until,
)
from tpu_vl.errors import ConfigError
from tpu_vl.server.serve import Server, run_server


def start(load, drain_s=5):
    """A server in a thread whose `load` is given, once its port answers."""
    config = server_config(port=free_port())
    server = Server(config, load, drain_s=drain_s)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, 10)
    return server, thread, httpx.Client(base_url=f"http://127.0.0.1:{config.port}", timeout=5)


def test_the_port_answers_while_the_model_loads():
    go_on = threading.Event()

    def load(state):
        state.report("weights", 5, 9)
        go_on.wait(10)
        return loaded_model(ScriptedEngine(say("a")))

    server, thread, client = start(load)
    with client:
        wait_until(lambda: server.state.progress.phase == "weights")
        health = client.get("/health")
        assert health.status_code == 503
        assert (health.json()["phase"], health.json()["done"]) == ("weights", 5)
        assert client.get("/live").status_code == 200
        go_on.set()
        wait_until(lambda: client.get("/health").status_code == 200)
        hello = {"messages": [{"role": "user", "content": "x"}]}
        assert client.post("/v1/chat/completions", json=hello).is_success
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def ended_while_answering(server, client):
    """The lines of an answer of which one has come when the server is told to end."""
    wait_until(lambda: client.get("/health").status_code == 200)
    hello = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=hello) as response:
        lines = response.iter_lines()
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        yield lines


def test_running_answers_end_before_the_server_does():
    engine = ScriptedEngine(say("a b c d e f g h", per_token_s=0.05))
    server, thread, client = start(lambda _: loaded_model(engine))
    with client, ended_while_answering(server, client) as lines:
        assert server.state.draining
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert not engine.aborted
    thread.join(10)
    assert not thread.is_alive()


def test_an_answer_that_outlasts_the_limit_is_cut():
    engine = ScriptedEngine(say("a " * 500, per_token_s=0.05))
    server, thread, client = start(lambda _: loaded_model(engine), drain_s=1)
    with client, ended_while_answering(server, client) as lines:
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        thread.join(10)
        assert not thread.is_alive()
    # The answer was aborted, or the engine ended before it came to that.
    engine.join(5)
    assert engine.aborted or engine.has_ended


def test_a_model_that_does_not_load_ends_the_server_with_its_error():
    def load(_):
        raise ConfigError("no such folder; check --model")

    with pytest.raises(ConfigError, match="check --model"):
        run_server(server_config(port=free_port()), load, drain_s=5)


def test_a_port_that_is_taken_is_named():
    with listening(say("a")) as (url, _, _):
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"{port}; change --host or --port"):
            run_server(server_config(port=port), lambda _: pytest.fail("loaded"), drain_s=5)


@pytest.fixture(scope="module")
def url():
    with listening(say("red circle")) as (url, _, _):
        yield url


def test_the_official_client_asks_about_pictures_and_films(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
        turn = {"role": "user", "content": [image_part(), frames_part(), text_part("which?")]}
        answer = client.chat.completions.create(model="tiny", messages=[turn])  # pyright: ignore
        assert answer.choices[0].message.content == "red circle"
        assert answer.usage is not None
        stream = client.chat.completions.create(
            model="tiny",
            messages=[turn],  # pyright: ignore
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
        chunks = list(stream)
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(texts) == "red circle"
        assert chunks[-1].usage == answer.usage


def test_the_official_client_sees_errors_as_its_own(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        ask = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="not served"):
            ask(model="other", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match=r"messages\.\[0\]"):
            ask(model="tiny", messages=[{"role": "user", "content": [image_part(b"x")]}])  # pyright: ignore
