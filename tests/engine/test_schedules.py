"""Random schedules: arrivals, aborts, tight pages, pools and budgets; nothing is ever lost."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.toy import (
    CONFIG,
    TIGHT,
    assert_nothing_held,
    chunked,
    make_engine,
    make_runner,
    medium,
    oracle,
    request,
    tokens,
)
from tpu_vl.engine.messages import Abort

MEDIA = [
    medium(1, 1, 4, 6),
    medium(2, 1, 8, 8),
    medium(3, 1, 2, 4),
    medium(4, 3, 4, 4, "video"),
    medium(5, 2, 2, 6, "video"),
]
CONFIGS = [
    TIGHT,
    chunked(7, pool_rows=16),
    replace(TIGHT, vision_step_patch_layers=50),
    replace(CONFIG, vision_step_patch_layers=100),
]
parts = st.lists(
    st.one_of(
        st.integers(0, 4).map(MEDIA.__getitem__),
        st.lists(st.integers(0, 30), min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=5,
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), parts, st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
    ),
    min_size=1,
    max_size=24,
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.sampled_from(CONFIGS), events)
def test_whatever_comes_every_answer_is_right_and_everything_is_given_back(config, events):
    engine = make_engine(config, make_runner(config))
    sent, aborted, emitted = {}, set(), []
    for kind, value, limit in events:
        if kind == "add":
            message = request(f"r{len(sent)}", value, max_tokens=limit)
            sent[message.request_id] = message
            emitted += engine.handle(message)
        elif kind == "abort":
            aborted.add(f"r{value}")
            emitted += engine.handle(Abort(request_id=f"r{value}"))
        else:
            for _ in range(value):
                if engine.has_work:
                    emitted += engine.step()
                engine.scheduler.check_integrity()
    for _ in range(2000):
        if not engine.has_work:
            break
        emitted += engine.step()
        engine.scheduler.check_integrity()
    assert_nothing_held(engine)
    for request_id, message in sent.items():
        outputs = [o for o in emitted if o.request_id == request_id]
        answer, expected = tokens(outputs), oracle(message)
        if outputs[-1].finish_reason == "abort":
            assert request_id in aborted
            assert answer == expected[: len(answer)]
        else:
            assert answer == expected
