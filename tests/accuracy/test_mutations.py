"""The gate against a server that sees wrongly: every planted mutation costs its task dearly."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.e2e.conftest import serve_in_thread
from tpu_vl import launch
from tpu_vl.accuracy import run, suite
from tpu_vl.flags import ServeFlags
from tpu_vl.server import frontend
from tpu_vl.server.preprocess import Preprocessor
from tpu_vl.spawn import free_port
from tpu_vl.vision import process

LEAST_COST = 0.1
# The task that must suffer, by mutation.
TASKS = {
    "media swapped": "which",
    "frames shuffled": "direction",
    "flat positions": "relation",
    "no DeepStack": "colour",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("executables"))


def serve(store: str) -> Any:
    return serve_in_thread(
        ServeFlags(
            port=free_port(), dtype="float32", max_model_len=1024, max_num_seqs=8, executables=store
        )
    )


@pytest.fixture(scope="module")
def base_url(store: str) -> Iterator[str]:
    served, thread = serve(store)
    yield served.base_url
    served.server.should_exit = True
    thread.join(30)


def shares(base_url: str, tasks: set[str], num_samples: int) -> dict[str, float]:
    """Share of right answers of some tasks of the suite."""

    def chosen(name: str, num_samples: int) -> Iterator[suite.Question]:
        return (q for q in suite.questions(name, num_samples) if q.task in tasks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "questions", chosen)
        scores = run.evaluate(base_url, "bundled", num_samples=num_samples, concurrency=8)
    assert scores.num_failed == 0, scores.examples
    return {task: score.share for task, score in scores.tasks.items()}


@pytest.fixture(scope="module", params=[40, pytest.param(200, marks=pytest.mark.slow)])
def num_samples(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def unharmed(base_url: str, num_samples: int) -> dict[str, float]:
    return shares(base_url, set(TASKS.values()), num_samples)


def swap_media(patch: pytest.MonkeyPatch) -> None:
    """The media of a request arrive in the reverse order."""
    real = Preprocessor.run

    async def reversed_run(self: Preprocessor, parts: Any, files: Any) -> Any:
        media, reservation = await real(self, parts, files)
        return media[::-1], reservation

    patch.setattr(Preprocessor, "run", reversed_run)


def shuffle_frames(patch: pytest.MonkeyPatch) -> None:
    """The frames of a clip stand in a random order; its timestamps stay."""
    rng = np.random.default_rng(0)
    real = process.patchify

    def shuffled(frames_THWC: np.ndarray, *args: Any) -> np.ndarray:
        return real(frames_THWC[rng.permutation(len(frames_THWC))], *args)

    patch.setattr(process, "patchify", shuffled)


def flatten_positions(patch: pytest.MonkeyPatch) -> None:
    """Media tokens are counted like text: time, row and column advance as one."""

    def flat(num_tokens: int, frames: Any, merge_size: int) -> tuple[np.ndarray, int]:
        del frames, merge_size
        return np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1)), 0

    patch.setattr(frontend, "mrope_positions", flat)


def zero_deepstack(patch: pytest.MonkeyPatch) -> None:
    """The DeepStack mergers give nothing."""
    real = launch.make_params

    def zeroed(*args: Any) -> Any:
        params = real(*args)
        levels = jax.tree.map(jnp.zeros_like, params.vision.deepstack)
        return replace(params, vision=replace(params.vision, deepstack=levels))

    patch.setattr(launch, "make_params", zeroed)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("media swapped", swap_media),
        ("frames shuffled", shuffle_frames),
        ("flat positions", flatten_positions),
    ],
)
def test_a_mutation_before_the_model_costs_its_task(
    base_url: str,
    unharmed: dict[str, float],
    num_samples: int,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    plant: Any,
) -> None:
    plant(monkeypatch)
    harmed = shares(base_url, {TASKS[name]}, num_samples)
    assert harmed[TASKS[name]] <= unharmed[TASKS[name]] - LEAST_COST


def test_a_mutation_of_the_weights_costs_its_task(
    store: str, unharmed: dict[str, float], num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero_deepstack(monkeypatch)
    served, thread = serve(store)
    task = TASKS["no DeepStack"]
    harmed = shares(served.base_url, {task}, num_samples)
    served.server.should_exit = True
    thread.join(30)
    assert harmed[task] <= unharmed[task] - LEAST_COST
