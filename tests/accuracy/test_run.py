"""The gate against servers that are right, wrong, broken or silent: it must be able to fail."""

import json
from functools import cache

import httpx
import pytest

from tpu_vl.accuracy import run
from tpu_vl.accuracy.suite import BUNDLED_TASKS, questions
from tpu_vl.errors import ConfigError

NUM = 2
NUM_REQUESTS = NUM * len(BUNDLED_TASKS)
MARKS: dict[str, float] = dict.fromkeys(BUNDLED_TASKS, 0.95)
# What the bundled model is promised to reach, by task; the others publish what they reach.
PROMISED = {
    **dict.fromkeys(("shape", "colour", "direction", "order", "relation"), 0.95),
    **dict.fromkeys(("count", "digit"), 0.9),
}


@cache
def right_answers():
    return {json.dumps(q.messages): q.answer for q in questions("bundled", NUM)}


class FakeServer:
    """Answers from a function of (the right answer, the number of the request)."""

    def __init__(self, reply):
        self.reply = reply
        self.right = right_answers()
        self.num_requests = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        assert request.url.path == "/v1/chat/completions"
        body = json.loads(request.content)
        assert body["model"] == "fake"
        assert body["temperature"] == 0
        self.num_requests += 1
        return self.reply(self.right[json.dumps(body["messages"])], self.num_requests)


def said(text, num_tokens=2):
    body = {
        "choices": [{"message": {"content": text}}],
        "usage": {"completion_tokens": num_tokens},
    }
    return httpx.Response(200, json=body)


def evaluate(reply):
    return run.evaluate(
        "http://fake",
        "bundled",
        num_samples=NUM,
        concurrency=3,
        transport=httpx.MockTransport(FakeServer(reply)),
    )


def test_right_answers_pass():
    scores = evaluate(lambda right, _: said(right))
    assert run.verdict(scores, MARKS) == []
    assert scores.num_requests == NUM_REQUESTS
    assert scores.num_generated_tokens == 2 * NUM_REQUESTS
    assert scores.model == "fake"
    shown = json.loads(json.dumps(scores.to_json()))
    assert {t["share"] for t in shown["tasks"].values()} == {1.0}


def test_wrong_answers_fail_and_only_their_task():
    scores = evaluate(lambda right, _: said("left" if right in ("up", "down", "right") else right))
    (reason,) = run.verdict(scores, MARKS)
    assert reason.startswith("direction: ")
    assert scores.examples


def test_a_longer_answer_is_wrong():
    scores = evaluate(lambda right, _: said(f"a {right}"))
    assert len(run.verdict(scores, MARKS)) == len(BUNDLED_TASKS)


def test_one_failed_request_fails():
    scores = evaluate(lambda right, n: said(right) if n > 1 else httpx.Response(500, text="oops"))
    assert scores.num_failed == 1
    assert f"1 of {NUM_REQUESTS} requests failed" in run.verdict(scores, dict.fromkeys(MARKS, 0.0))


def test_a_broken_connection_is_a_failed_request():
    def reply(right, n):
        if n == 1:
            raise httpx.ReadError("gone")
        return said(right)

    assert evaluate(reply).num_failed == 1


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": {}}]}, []])
def test_a_malformed_answer_is_a_failed_request(answer):
    scores = evaluate(lambda _right, _n: httpx.Response(200, json=answer))
    assert scores.num_failed == NUM_REQUESTS


def test_silence_fails_even_without_marks():
    scores = evaluate(lambda _right, _n: said("", 0))
    reasons = run.verdict(scores, dict.fromkeys(MARKS, 0.0))
    assert any("no token at all" in reason for reason in reasons)
    assert any("answers have no token" in reason for reason in reasons)


def test_one_empty_answer_fails():
    scores = evaluate(lambda right, n: said(right) if n > 1 else said("", 0))
    assert scores.num_empty == 1
    assert run.verdict(scores, dict.fromkeys(MARKS, 0.0)) == [
        f"1 of {NUM_REQUESTS} answers have no token"
    ]


def test_a_task_without_a_mark_fails():
    scores = evaluate(lambda right, _: said(right))
    fewer = {task: mark for task, mark in MARKS.items() if task != "direction"}
    assert run.verdict(scores, fewer) == ["direction: there is no mark"]
    assert run.verdict(scores, {**MARKS, "sound": 0.9}) == ["sound: there is no answer"]


def test_no_server_is_a_clear_error():
    def refuse(_request):
        raise httpx.ConnectError("refused")

    with pytest.raises(ConfigError, match="start `tpu-vl serve`"):
        run.evaluate(
            "http://fake",
            "bundled",
            num_samples=1,
            concurrency=1,
            transport=httpx.MockTransport(refuse),
        )


def test_concurrency_is_checked():
    with pytest.raises(ConfigError, match="--concurrency 0"):
        run.evaluate("http://fake", "bundled", num_samples=1, concurrency=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "served"])
def test_marks_hold_the_promise(dtype):
    marks = run.read_marks("bundled", dtype)
    assert set(marks) == set(BUNDLED_TASKS)
    assert all(marks[task] >= mark for task, mark in PROMISED.items())
    assert all(0 < mark <= 1 for mark in marks.values())


def test_marks_that_do_not_exist():
    with pytest.raises(ConfigError, match="bundled/float32"):
        run.read_marks("bundled", "float8")
