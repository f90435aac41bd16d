"""What a first request needs was compiled before, and warm-up takes no memory of its own."""

import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import jax
import numpy as np
import pytest

from tests.e2e.conftest import Served, serve_in_thread
from tests.e2e.media import clip, image_part, picture, text_part, video_part
from tests.guard import only_executables
from tpu_vl.flags import ServeFlags
from tpu_vl.server.state import ServerState
from tpu_vl.spawn import free_port

# Width, height; the first is the size for which another server compiled for over a minute.
SIZES = [(640, 360)] + [
    (w, h) for w in (32, 100, 224, 333, 512) for h in (48, 150, 256, 480) if (w, h) != (32, 48)
]


@pytest.fixture(scope="module")
def large(served: Served, flags: ServeFlags) -> Iterator[Served]:
    """The same programs with pictures of up to 256 tokens."""
    del served  # it has compiled them
    changed = dataclasses.replace(
        flags, port=free_port(), image_min_tokens=1, image_max_tokens=256, require_executables=True
    )
    large, thread = serve_in_thread(changed)
    yield large
    large.server.should_exit = True
    thread.join(30)


def ask(served: Served, *parts: dict[str, Any]) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3}
    answer = httpx.post(f"{served.base_url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text[:500]
    return answer.json()


@contextmanager
def nothing_compiles(served: Served) -> Iterator[None]:
    """Neither traces nor eager primitives nor backend compilations happen inside."""
    compiles = served.server.state.model.compiles_after_ready  # pyright: ignore
    before = compiles()
    with only_executables() as tried:
        yield
    assert tried == []
    assert compiles() == before


def test_no_picture_size_compiles(large: Served) -> None:
    rng = np.random.default_rng(1)
    text = text_part("What shape is this?")
    pictures = [image_part(picture(rng, height, width)) for width, height in SIZES]
    assert len(pictures) == 20
    with nothing_compiles(large):
        without = ask(large, text)["usage"]["prompt_tokens"]
        answers = [ask(large, part, text) for part in pictures]
    tokens = [a["usage"]["prompt_tokens"] - without for a in answers]
    assert tokens[0] == 220 + 2, "640x360 is 220 tokens between two delimiters"
    assert len(set(tokens)) > 10


def test_no_mix_of_text_and_pictures_compiles(large: Served) -> None:
    rng = np.random.default_rng(2)
    text = text_part("Which colour is it?")
    image = image_part(picture(rng, 96, 96))
    with nothing_compiles(large), ThreadPoolExecutor(4) as threads:
        ask(large, text)
        ask(large, image, text)
        together = [threads.submit(ask, large, *parts) for parts in ((text,), (image, text)) * 3]
        for future in together:
            future.result()
        ask(large, text)


def test_no_number_of_frames_compiles(large: Served) -> None:
    rng = np.random.default_rng(3)
    text = text_part("Which way does it move?")
    videos = [video_part(clip(rng, n, 64, 64, fps=2)) for n in (2, 3, 4, 7, 8, 16, 31)]
    with nothing_compiles(large):
        tokens = [ask(large, part, text)["usage"]["prompt_tokens"] for part in videos]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) >= 5


def live_bytes() -> int:
    """Memory of every live array, each copy on each device counted."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize * len(a.sharding.device_set)
        for a in jax.live_arrays()
    )


def test_warm_up_takes_no_more_memory_than_serving(
    served: Served, flags: ServeFlags, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[int] = []
    calls: list[object] = []
    call, report = jax.stages.Compiled.__call__, ServerState.report

    def watched_call(executable: jax.stages.Compiled, *args: Any, **kwargs: Any) -> Any:
        result = call(executable, *args, **kwargs)
        calls.append(executable)
        samples.append(live_bytes())
        return result

    def watched_report(state: ServerState, *args: Any) -> None:
        samples.append(live_bytes())
        report(state, *args)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", watched_call)
    monkeypatch.setattr(ServerState, "report", watched_report)
    served.wait_idle()
    before = live_bytes()
    changed = dataclasses.replace(flags, port=free_port(), require_executables=True)
    another, thread = serve_in_thread(changed)
    warm_peak = max(samples) - before
    assert len(calls) == 1, "nothing but the zeros of the state runs before a request"
    assert len(samples) > 10
    assert warm_peak > 1_000_000, "weights and state are counted"
    samples.clear()
    ask(another, image_part(picture(np.random.default_rng(4), 96, 96)), text_part("What is it?"))
    assert warm_peak <= max(samples) - before
    another.server.should_exit = True
    thread.join(30)
