"""Messages are the whole contract: they survive MessagePack unchanged."""

import msgspec
import numpy as np
import pytest

from tests.engine.toy import (
    IMAGE,
    assert_nothing_held,
    make_engine,
    medium,
    oracle,
    request,
    run,
    tokens,
)
from tpu_vl.engine.messages import (
    Abort,
    Dead,
    FromEngine,
    Output,
    Shutdown,
    Stats,
    ToEngine,
    TokenLogprobs,
)

REQUEST = request(
    "r", [[1], medium(1, 2, 4, 6, "video"), [2]], logit_bias=((IMAGE, 1.5),), stop_token_ids=(9,)
)


@pytest.mark.parametrize("message", [REQUEST, Abort(request_id="r"), Shutdown()])
def test_messages_to_the_engine_survive_msgpack(message):
    packed = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(packed, type=ToEngine) == message


@pytest.mark.parametrize(
    "message",
    [
        Output(
            request_id="r",
            token_ids=(1, 2),
            logprobs=(TokenLogprobs(logprob=-0.5, top=((1, -0.5), (7, -2.0))),),
            finish_reason="stop",
            stop_token_id=2,
        ),
        Stats(running=1, kv_usage=0.25),
        Dead(reason="why"),
    ],
)
def test_messages_from_the_engine_survive_msgpack(message):
    packed = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(packed, type=FromEngine) == message


def test_a_request_that_came_as_bytes_is_answered_the_same():
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUEST), type=ToEngine)
    engine = make_engine()
    assert tokens(run(engine, [decoded])["r"]) == oracle(REQUEST)
    assert_nothing_held(engine)


def test_patches_are_a_view_of_the_bytes():
    patches = REQUEST.media[0].patches_PW()
    assert patches.shape == (2 * 4 * 6, 3)
    assert not patches.flags.owndata
    np.testing.assert_array_equal(patches, medium(1, 2, 4, 6, "video")["px"])
