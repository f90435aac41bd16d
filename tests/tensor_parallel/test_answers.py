"""Any number of devices answers as one does: text, pictures and videos, both tower modes."""

import numpy as np
import pytest

from tests.tensor_parallel.model import SIZES, VOCAB, request, served
from tpu_vl.engine.messages import AddRequest, Output

MESSAGES = [
    request("text", [11]),
    request("image", [3, ("image", 1, 1, 4, 6), 4, ("image", 2, 1, 8, 8), 2]),
    request("video", [2, ("video", 3, 3, 4, 4), 5]),
    request("both", [("video", 4, 2, 2, 6), 1, ("image", 1, 1, 4, 6), 3]),
]


def tops(outputs: list[Output]) -> tuple[list[int], np.ndarray]:
    """The tokens, and the likeliest 20 with their log-probabilities, of every answer token."""
    entries = [entry for output in outputs for entry in output.logprobs]
    values = np.asarray([[value for _, value in entry.top] for entry in entries])
    assert all(0 <= token < VOCAB for entry in entries for token, _ in entry.top)
    return [t for output in outputs for t in output.token_ids], values


def assert_equal_to_one_device(messages: list[AddRequest], num_shards: int, mode: str) -> None:
    wanted = served(1, "weights").answer(messages)
    found = served(num_shards, mode).answer(messages)
    for message in messages:
        want, got = tops(wanted[message.request_id]), tops(found[message.request_id])
        assert got[0] == want[0]
        np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "num_shards", [pytest.param(n, marks=[pytest.mark.slow] * (n == 6)) for n in SIZES[1:]]
)
def test_answers_equal_those_of_one_device(num_shards: int) -> None:
    assert_equal_to_one_device(MESSAGES, num_shards, "weights")


@pytest.mark.parametrize("num_shards", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_with_whole_frames_per_device_too(num_shards: int) -> None:
    assert_equal_to_one_device(MESSAGES, num_shards, "data")
