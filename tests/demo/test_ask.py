"""`ask` against small servers: right, wrong, silent and absent."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tpu_vl.demo import MEDIA, NOTICE
from tpu_vl.demo.ask import ask

ANSWERS = {
    item["question"]: item["answer"] for item in json.loads((MEDIA / "answers.json").read_text())
}


@contextmanager
def server(reply):
    """Streams `reply(question)` word by word; None is an error 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send(200, "application/json", b'{"object":"list","data":[{"id":"fake"}]}')

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            media, text = body["messages"][0]["content"]
            assert media[media["type"]]["url"].startswith("data:")
            assert body["stream"] is True
            said = reply(text["text"])
            if said is None:
                self.send(500, "application/json", b'{"error":{"message":"broken"}}')
                return
            chunks: list[dict[str, object]] = [
                {"choices": [{"index": 0, "delta": {"content": w}}]} for w in said
            ]
            chunks.append({"choices": [], "usage": {"completion_tokens": len(said) + 1}})
            lines = [f"data: {json.dumps({'id': 'x', **c})}\n\n" for c in chunks]
            self.send(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

        def send(self, status, content_type, body):
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            del format, args

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def test_right_answers_are_streamed_and_timed(capsys):
    with server(lambda question: ANSWERS[question].replace(" ", "| ").split("|")) as url:
        assert ask(url) == 0
    printed = capsys.readouterr().out
    for answer in ANSWERS.values():
        assert answer in printed
    assert printed.count("time to first token") == len(ANSWERS)
    assert printed.count("tokens/s") == len(ANSWERS)
    assert NOTICE in printed


@pytest.mark.parametrize("question", ANSWERS)
def test_one_wrong_answer_is_a_failure(capsys, question):
    with server(lambda asked: ["no"] if asked == question else [ANSWERS[asked]]) as url:
        assert ask(url) == 1
    assert f"wrong, it is {ANSWERS[question]}" in capsys.readouterr().out


def test_silence_is_a_failure():
    with server(lambda _: []) as url:
        assert ask(url) == 1


def test_an_error_is_a_failure(capsys):
    with server(lambda _: None) as url:
        assert ask(url) == 1
    assert "the server did not answer" in capsys.readouterr().out


def test_no_server_is_a_failure(capsys):
    assert ask("http://127.0.0.1:9") == 1
    assert "the server did not answer" in capsys.readouterr().out
