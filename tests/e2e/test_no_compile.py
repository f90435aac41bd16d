"""After ready, nothing but listed executables runs on the device: 60 random requests, or 300."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Served
from tests.e2e.media import Pool
from tests.guard import only_executables


def send(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, (answer.text[:500], body["messages"][0]["content"][-1])
    return answer.json()


def check(answer: dict[str, Any], body: dict[str, Any]) -> None:
    assert len(answer["choices"]) == body.get("n", 1)
    assert answer["usage"]["completion_tokens"] >= answer["choices"][0]["finish_reason"].count("o")
    assert 1 <= answer["usage"]["completion_tokens"] <= body["max_tokens"] * body.get("n", 1)
    for choice in answer["choices"]:
        assert (choice["logprobs"] is not None) == bool(body.get("logprobs"))


@pytest.mark.parametrize(
    "num_requests", [60, pytest.param(300, marks=pytest.mark.slow)], ids=["60", "300"]
)
def test_random_requests_reach_executables_only(
    served: Served, client: httpx.Client, num_requests: int
) -> None:
    pool = Pool(seed=num_requests)
    bodies = [pool.request() for _ in range(num_requests)]
    compiles = served.server.state.model.compiles_after_ready  # pyright: ignore
    before = compiles()
    with only_executables() as tried, ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda body: send(client, body), bodies))
    assert tried == []
    assert compiles() == before
    for answer, body in zip(answers, bodies, strict=True):
        check(answer, body)
