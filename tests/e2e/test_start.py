"""The second start compiles nothing and answers bit for bit the same; text-only starts smaller."""

import dataclasses
import logging
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Served, serve_in_thread
from tpu_vl.flags import ServeFlags
from tpu_vl.spawn import free_port


def answer(base_url: str) -> tuple[str, list[float]]:
    body = {
        "messages": [{"role": "user", "content": "Which way does it move?"}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": True,
    }
    reply = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60)
    choice = reply.json()["choices"][0]
    return choice["message"]["content"], [t["logprob"] for t in choice["logprobs"]["content"]]


def test_second_start_compiles_nothing(
    served: Served, store_folder: Path, flags: ServeFlags, caplog: pytest.LogCaptureFixture
) -> None:
    first = answer(served.base_url)
    with caplog.at_level(logging.INFO):
        again, thread = serve_in_thread(
            dataclasses.replace(flags, port=free_port(), executables=str(store_folder))
        )
    assert ", 0 of them compiled now" in caplog.text
    assert answer(again.base_url) == first
    again.server.should_exit = True
    thread.join(30)


def test_progress_is_reported_until_ready(served: Served) -> None:
    health = httpx.get(f"{served.base_url}/health")
    assert health.status_code == 200
    metrics = httpx.get(f"{served.base_url}/metrics").text
    assert "vllm:num_requests_running" in metrics
    assert "vllm:kv_cache_usage_perc" in metrics
