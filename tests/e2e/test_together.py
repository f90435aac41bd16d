"""What a request gives alone, it gives among others, token for token (float32, greedy)."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.conftest import Served
from tests.e2e.media import Pool, image_part, picture, text_part


def answer(client: httpx.Client, content: list[dict[str, Any]]) -> list[tuple[str, float]]:
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": True,
    }
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text[:300]
    tokens = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 12
    return [(str(t["bytes"]), t["logprob"]) for t in tokens]


def same(a: list[tuple[str, float]], b: list[tuple[str, float]]) -> bool:
    tokens = [t for t, _ in a] == [t for t, _ in b]
    return tokens and all(abs(x - y) < 1e-3 for (_, x), (_, y) in zip(a, b, strict=True))


def test_sixteen_mixed_requests_equal_solo(client: httpx.Client) -> None:
    pool = Pool(seed=11)
    contents = [pool.content() for _ in range(16)]
    alone = [answer(client, c) for c in contents]
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(lambda c: answer(client, c), contents))
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        assert same(a, b), i
    assert not same(alone[0], alone[1]), "the comparison must be able to fail"


def test_same_image_twice_and_across_a_chunk(served: Served, client: httpx.Client) -> None:
    pool = Pool(seed=5)
    image = image_part(picture(pool.rng, 180, 180))
    other = image_part(picture(pool.rng, 150, 150))
    # 96 tokens a step: the padding text moves the second image over the chunk's edge.
    for words in range(60, 96, 5):
        content = [image, text_part("a " * words), image, text_part("which?")]
        alone = answer(client, content)
        with ThreadPoolExecutor(3) as threads:
            crowd = threads.map(lambda c: answer(client, c), [content, [other, *content], content])
            first, _, last = crowd
        assert same(alone, first)
        assert same(alone, last)
    assert served.scheduler.num_frame_hits > 0
