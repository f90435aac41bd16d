"""The asyncio client over the engine's thread: only messages cross."""

import asyncio
import time
from dataclasses import replace

import pytest

from tests.engine.toy import CONFIG, make_engine, make_runner, medium, oracle, request, tokens
from tpu_vl.engine import layout
from tpu_vl.engine.client import EngineClient
from tpu_vl.engine.engine import EngineThread
from tpu_vl.errors import EngineDeadError, OverloadedError, TpuVlError

A = medium(1, 1, 4, 6)


def with_client(body, config=CONFIG, runner=None):
    """Runs `body(client, engine)` in a loop with a started client, then shuts it down."""

    async def main():
        engine = make_engine(config, runner)
        client = EngineClient(EngineThread(engine), config)
        client.start(asyncio.get_running_loop())
        try:
            return await body(client, engine)
        finally:
            await asyncio.to_thread(client.shutdown)

    return asyncio.run(main())


async def answer(client, message):
    return [output async for output in client.generate(message)]


async def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def idle(client):
    stats = client.stats
    return (stats.running, stats.waiting, stats.kv_usage, stats.pool_usage) == (0, 0, 0, 0)


def test_many_requests_at_once_each_get_their_own_answer():
    messages = [request(f"r{i}", [[i], A, [1] * (i % 5 + 1)], max_tokens=9) for i in range(40)]

    async def body(client, _):
        outputs = await asyncio.gather(*(answer(client, m) for m in messages))
        await until(lambda: idle(client))
        assert client.stats.frames_encoded_total == 1
        assert client.stats.steps_total > 0
        return outputs

    for message, outputs in zip(messages, with_client(body), strict=True):
        assert tokens(outputs) == oracle(message)
        assert outputs[-1].finish_reason == "length"


def test_closing_the_iterator_aborts_and_frees():
    long = request("long", [[1], A], max_tokens=150)

    async def body(client, engine):
        stream = client.generate(long)
        async for _ in stream:
            break
        await stream.aclose()
        await until(lambda: idle(client) and not engine.open_requests)
        after = request("after", [[2], A])
        assert tokens(await answer(client, after)) == oracle(after)
        return engine.stats().steps_total

    assert with_client(body) < 100  # 150 answer tokens would take as many steps


def test_a_cancelled_reader_aborts():
    async def body(client, engine):
        task = asyncio.create_task(answer(client, request("r", [[1]], max_tokens=190)))
        await until(lambda: client.stats.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: idle(client) and not engine.open_requests)

    with_client(body)


def test_abort_ends_the_stream_with_its_reason():
    async def body(client, _):
        task = asyncio.create_task(answer(client, request("r", [[1]], max_tokens=190)))
        await until(lambda: client.stats.running == 1)
        client.abort("r")
        client.abort("unknown")
        return await task

    assert with_client(body)[-1].finish_reason == "abort"


def test_a_full_queue_refuses_and_recovers():
    config = replace(CONFIG, max_num_queued_reqs=0)

    async def body(client, _):
        message = request("r", [[1]], max_tokens=100)
        streams = [
            asyncio.create_task(answer(client, request(f"r{i}", [[i]], max_tokens=100)))
            for i in range(CONFIG.max_num_seqs)
        ]
        await asyncio.sleep(0)
        assert client.queue_full
        with pytest.raises(OverloadedError, match="max-num-queued-reqs") as caught:
            await answer(client, message)
        assert caught.value.status == 503
        await asyncio.gather(*streams)
        assert not client.queue_full
        assert tokens(await answer(client, message)) == oracle(message)

    with_client(body, config)


def test_a_request_at_fault_does_not_end_the_loop():
    async def body(client, _):
        (bad,) = await answer(client, request("bad", [[10**6]]))
        assert bad.finish_reason == "error"
        good = request("good", [[1]])
        assert tokens(await answer(client, good)) == oracle(good)
        assert client.dead is None

    with_client(body)


def test_a_failure_of_the_loop_ends_every_request_and_says_why():
    runner = make_runner(CONFIG, without=layout.text_name(64))

    async def body(client, _):
        outputs = await asyncio.gather(
            *(answer(client, request(f"r{i}", [[1] * 40])) for i in range(3))
        )
        assert [o[-1].finish_reason for o in outputs] == ["error"] * 3
        assert "text/64" in (outputs[0][-1].error or "")
        await until(lambda: client.dead is not None)
        assert "MissingProgramError" in client.dead
        with pytest.raises(EngineDeadError, match="restart"):
            await answer(client, request("late", [[1]]))

    with_client(body, runner=runner)


def test_an_id_that_is_open_is_refused():
    async def body(client, _):
        task = asyncio.create_task(answer(client, request("r", [[1]], max_tokens=50)))
        await asyncio.sleep(0)
        with pytest.raises(TpuVlError, match="already open"):
            await answer(client, request("r", [[1]]))
        assert len(tokens(await task)) == 50

    with_client(body)


def test_an_idle_loop_sleeps():
    async def body(client, _):
        await answer(client, request("r", [[1]]))
        await until(lambda: idle(client))
        before = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - before

    assert with_client(body) < 0.25


def test_shutdown_ends_open_requests():
    async def body(client, _):
        task = asyncio.create_task(answer(client, request("r", [[1]], max_tokens=190)))
        await until(lambda: client.stats.running == 1)
        await asyncio.to_thread(client.shutdown)
        return await task

    assert with_client(body)[-1].finish_reason == "error"
