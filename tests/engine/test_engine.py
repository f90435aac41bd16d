"""The engine over the toy family: whatever the schedule, each request answers as the oracle."""

import gc
import sys
from dataclasses import replace

import jax
import msgspec
import pytest

from tests.engine.toy import (
    CONFIG,
    IMAGE,
    TEXT_ONLY,
    TIGHT,
    assert_nothing_held,
    chunked,
    make_engine,
    make_runner,
    medium,
    oracle,
    request,
    run,
    tokens,
)
from tpu_vl.engine import layout
from tpu_vl.engine.messages import Abort
from tpu_vl.errors import MissingProgramError

A, B, C = medium(1, 1, 4, 6), medium(2, 1, 8, 8), medium(3, 1, 2, 4)
VIDEO = medium(4, 3, 4, 4, "video")


def mixed_requests() -> list:
    """Sixteen of every kind: text, images, videos, orders, lengths."""
    parts = [
        [[1, 2, 3]],
        [[4], A],
        [A, [5, 6]],
        [[7] * 40],
        [VIDEO, [8], A],
        [A, [9], VIDEO],
        [A, A, A, B, A],
        [[1], B, [2], C, [3], B, [4]],
        [VIDEO, VIDEO],
        [[10] * 90],
        [C],
        [[11, 12], VIDEO, [13] * 20, B],
        [[14]],
        [B, B],
        [[15] * 30, C, [16] * 30],
        [medium(5, 1, 6, 6), [17]],
    ]
    return [request(f"r{i}", p, max_tokens=3 + i) for i, p in enumerate(parts)]


@pytest.mark.parametrize("per_step", [16, 1, 3])
def test_sixteen_mixed_requests_answer_as_each_alone(per_step):
    messages = mixed_requests()
    engine = make_engine()
    outputs = run(engine, messages, per_step=per_step)
    for message in messages:
        assert tokens(outputs[message.request_id]) == oracle(message), message.request_id
    assert_nothing_held(engine)


def test_more_requests_than_slots_wait_and_all_are_answered():
    messages = mixed_requests()
    engine = make_engine(replace(CONFIG, max_num_seqs=3))
    outputs = run(engine, messages)
    assert [tokens(outputs[m.request_id]) for m in messages] == [oracle(m) for m in messages]
    assert_nothing_held(engine)


@pytest.mark.parametrize("chunk", [7, 32, 33, 96])
def test_the_chunk_size_does_not_change_answers(chunk):
    messages = [
        request("image", [[1] * 5, B, [2] * 9, A, [3] * 3, B]),
        request("video", [[4] * 30, VIDEO, [5]]),
        request("text", [[6] * 100]),
    ]
    engine = make_engine(chunked(chunk))
    outputs = run(engine, messages)
    assert [tokens(outputs[m.request_id]) for m in messages] == [oracle(m) for m in messages]
    assert_nothing_held(engine)


@pytest.mark.parametrize("inside", ["first", "middle", "last"])
def test_chunks_that_end_inside_the_second_of_three_images(inside):
    # A prompt of one chunk of 16 tokens and a part of the next, up to the place in image 2.
    within = {"first": 1, "middle": 8, "last": 15}[inside]
    text = 32 - 6 - 3 - within  # A fills 6 tokens, delimiters of A and B three
    message = request("r", [[1] * text, A, B, [3], C, [4]], max_tokens=5)
    assert message.media[1].starts[0] + within == 32
    assert tokens(run(make_engine(chunked(16)), [message])["r"]) == oracle(message)


def test_an_image_of_several_chunks_is_encoded_once():
    message = request("r", [[1], B, [2]])
    engine = make_engine(chunked(7))
    assert tokens(run(engine, [message])["r"]) == oracle(message)
    assert engine.stats().frames_encoded_total == 1


def test_the_same_image_is_encoded_once_over_requests_and_places():
    engine = make_engine()
    messages = [request("r0", [A, A, A, B, A]), request("r1", [[1], A]), request("r2", [B, [2], A])]
    outputs = run(engine, messages, per_step=1)
    assert [tokens(outputs[m.request_id]) for m in messages] == [oracle(m) for m in messages]
    stats = engine.stats()
    assert stats.frames_encoded_total == 2
    assert stats.media_cache_queries_total == 8
    assert stats.media_cache_hits_total == 6
    assert_nothing_held(engine)


def test_an_image_repeated_behind_a_chunk_border_in_a_pool_of_one_image():
    message = request("r", [A, [1] * 7, A, [2], B, [3] * 4, A])
    engine = make_engine(chunked(7, pool_rows=16))
    assert tokens(run(engine, [message])["r"]) == oracle(message)
    assert engine.stats().frames_encoded_total == 3  # A stays until B needs its rows
    assert_nothing_held(engine)


def test_big_images_of_several_requests_share_a_pool_of_the_largest_frame():
    big = [medium(20 + i, 1, 8, 8) for i in range(5)]
    messages = [request(f"r{i}", [[i], big[i], [1], big[(i + 1) % 5], C]) for i in range(5)]
    engine = make_engine(TIGHT)
    outputs = run(engine, messages, max_steps=200)
    assert [tokens(outputs[m.request_id]) for m in messages] == [oracle(m) for m in messages]
    assert_nothing_held(engine)


@pytest.mark.parametrize("budget", [1, 64, 200, 300])
def test_tower_slices_do_not_change_answers_and_bound_the_work_of_a_step(budget):
    engine = make_engine(replace(CONFIG, vision_step_patch_layers=budget))
    messages = mixed_requests()
    outputs = run(engine, messages)
    assert [tokens(outputs[m.request_id]) for m in messages] == [oracle(m) for m in messages]
    assert engine.stats().encoder_calls_total > 1
    assert_nothing_held(engine)


def test_decoding_goes_on_while_a_large_frame_is_encoded_in_slices():
    engine = make_engine(replace(CONFIG, vision_step_patch_layers=1))
    text = request("text", [[1, 2]], max_tokens=30)
    image = request("image", [B, [3]], max_tokens=2)
    outputs = run(engine, [text, image], per_step=1)
    assert tokens(outputs["text"]) == oracle(text)
    assert tokens(outputs["image"]) == oracle(image)


def test_forced_preemption_keeps_answers_and_encodes_again_what_is_gone():
    # Eight requests whose answers outgrow the pages, with a pool that forgets their images.
    messages = [
        request(f"r{i}", [[i], medium(30 + i, 1, 8, 8), [2]], max_tokens=60) for i in range(8)
    ]
    engine = make_engine(TIGHT)
    outputs = run(engine, messages)
    assert [tokens(outputs[m.request_id]) for m in messages] == [oracle(m) for m in messages]
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.frames_encoded_total > 8
    assert_nothing_held(engine)


def test_penalties_count_the_same_after_a_preemption():
    odd = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 5}
    messages = [
        request(f"r{i}", [[i, 1, 1]], max_tokens=70, **{**odd, "seed": i}) for i in range(6)
    ]
    calm = make_engine(CONFIG)
    expected = run(calm, messages)
    assert calm.stats().preemptions_total == 0
    tight = make_engine(TIGHT)
    outputs = run(tight, messages)
    assert tight.stats().preemptions_total > 0
    for m in messages:
        assert tokens(outputs[m.request_id]) == tokens(expected[m.request_id])


def test_sampled_rows_do_not_depend_on_the_batch():
    sampling = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_k": 5, "seed": 2},
        {"temperature": 1.5, "top_p": 0.7, "seed": 3, "num_logprobs": 3},
        {"temperature": 2.0, "min_p": 0.1, "seed": 4, "presence_penalty": 1.5},
        {"logit_bias": ((7, 4.0), (8, 4.0)), "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 1, "logit_bias": tuple((i, 0.1 * i) for i in range(60))},
    ]
    messages = [request(f"r{i}", [[i], A, [1]], **s) for i, s in enumerate(sampling)]
    together = run(make_engine(), messages)
    for message in messages:
        alone = run(make_engine(), [message])
        assert tokens(together[message.request_id]) == tokens(alone[message.request_id])


def test_position_deltas_belong_to_requests():
    """Text rows keep delta 0 beside image rows that decode, whoever came first."""
    first = request("first", [[1], A, [2]], max_tokens=20)
    text = request("text", [[3] * 4], max_tokens=20)
    larger = request("larger", [[4], B, [5]], max_tokens=20)
    assert len({m.position_delta for m in (first, text, larger)}) == 3
    outputs = run(make_engine(), [first, text, larger], per_step=1)
    for message in (first, text, larger):
        assert tokens(outputs[message.request_id]) == oracle(message)


def test_the_delta_and_positions_hold_over_chunks():
    """5 text + an image of 4 x 8 cells + 3 text: the delta is -24 whatever the chunks."""
    message = request("r", [[1] * 4, medium(6, 1, 8, 16), [2] * 2], max_tokens=6)
    assert len(message.token_ids) // 4 == 40
    assert message.position_delta == -24
    engine = make_engine(chunked(16))
    assert tokens(run(engine, [message])["r"]) == oracle(message)


def test_features_land_in_prompt_order():
    for parts in ([VIDEO, A, VIDEO], [VIDEO, [1], A], [A, [1], VIDEO], [A, B, [1] * 5, C]):
        message = request("r", parts)
        assert tokens(run(make_engine(), [message])["r"]) == oracle(message)
    swapped = request("r", [B, A, [1] * 5, C])
    assert oracle(swapped) != oracle(request("r", [A, B, [1] * 5, C]))


def test_a_text_only_engine_has_no_pool_and_answers_text():
    engine = make_engine(TEXT_ONLY)
    message = request("text", [[1, 2, 3] * 10], media=False)
    with_positions = request("text", [[1, 2, 3] * 10])
    assert tokens(run(engine, [message])["text"]) == oracle(with_positions, never=())
    refused = run(engine, [request("image", [A])])["image"]
    assert refused[-1].finish_reason == "error"
    assert "text-model-only" in (refused[-1].error or "")


def test_two_devices_answer_as_one_and_each_gets_its_own_patches():
    config = chunked(32, tensor_parallel_size=2)
    runner, placed = make_runner(config), []
    place = runner.place

    def noted(patches_PW, meta):
        placed.append(place(patches_PW, meta))
        return placed[-1]

    runner.place = noted  # pyright: ignore[reportAttributeAccessIssue]
    messages = [request("image", [[1], A, VIDEO, [2]]), request("text", [[3] * 40])]
    outputs = run(make_engine(config, runner), messages)
    assert [tokens(outputs[m.request_id]) for m in messages] == [oracle(m) for m in messages]
    assert placed
    for call in placed:
        shards = [shard.data.shape for shard in call.patches_PW.addressable_shards]
        assert shards == [(128, 3)] * 2


def test_only_the_last_token_of_a_prompt_gives_a_hidden_row():
    """A prefill gives [rows, width]: rows of sequences, not of tokens."""
    runner, shapes = make_runner(CONFIG), []
    text = runner.text

    def noted(batch):
        hidden_RD = text(batch)
        shapes.append((batch.num_tokens, hidden_RD.shape[0], len(batch.sampled)))
        return hidden_RD

    runner.text = noted  # pyright: ignore[reportAttributeAccessIssue]
    run(make_engine(runner=runner), [request("r", [[1] * 9, B, [2] * 9], max_tokens=1)])
    assert shapes == [(64, 16, 1)]


def test_a_missing_program_raises_and_names_it():
    engine = make_engine(runner=make_runner(CONFIG, without=layout.text_name(64)))
    with pytest.raises(MissingProgramError, match="text/64"):
        run(engine, [request("r", [[1] * 30])])


def test_stop_tokens_and_limits_end_an_answer():
    free = oracle(request("r", [[1, 2]], max_tokens=20))
    stop = free[6]
    engine = make_engine()
    stopping = request("r", [[1, 2]], max_tokens=20, stop_token_ids=(stop,))
    outputs = run(engine, [stopping])["r"]
    assert tokens(outputs) == oracle(stopping) == free[: free.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", stop)
    held = request("r", [[1, 2]], max_tokens=20, stop_token_ids=(stop,), min_tokens=12)
    outputs = run(engine, [held])["r"]
    assert stop not in tokens(outputs)[:12]
    limited = run(engine, [request("r", [[3] * 150], max_tokens=1000)])["r"]
    assert len(tokens(limited)) == 50  # up to max_model_len
    assert limited[-1].finish_reason == "length"
    assert_nothing_held(engine)


def test_the_next_step_is_dispatched_before_tokens_are_read(monkeypatch):
    engine, events = make_engine(), []
    text, read = engine._runner.text, engine._read
    monkeypatch.setattr(engine._runner, "text", lambda b: (events.append("text"), text(b))[1])
    monkeypatch.setattr(engine, "_read", lambda f: (events.append("read"), read(f))[1])
    run(engine, [request("r", [[1, 2]], max_tokens=4)])
    assert events == ["text", "text", "read", "text", "read", "text", "read", "read"]
    stop = oracle(request("r", [[1, 2]], max_tokens=3))[2]
    events.clear()
    outputs = run(engine, [request("r", [[1, 2]], max_tokens=50, stop_token_ids=(stop,))])["r"]
    assert len(tokens(outputs)) == 3
    assert events.count("text") == 4  # one token too many was computed, and dropped
    assert_nothing_held(engine)


def test_logprobs_come_with_the_tokens():
    message = request("r", [[1], A], num_logprobs=4, max_tokens=5)
    plain = request("plain", [[1, 2]], max_tokens=5)
    outputs = run(make_engine(), [message, plain])
    for output in outputs["r"]:
        (entry,) = output.logprobs
        assert entry.top[0] == (output.token_ids[0], entry.logprob)  # greedy: the likeliest
        assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)
        assert len(entry.top) == 4
        assert not {IMAGE} & {i for i, _ in entry.top}
    assert all(output.logprobs == () for output in outputs["plain"])


def test_aborts_at_any_time_free_everything():
    for when in range(12):
        engine = make_engine(replace(CONFIG, vision_step_patch_layers=64))
        messages = [request("a", [B, [1], VIDEO], max_tokens=30), request("b", [B, [2]])]
        for message in messages:
            assert engine.handle(message) == []
        emitted = [o for _ in range(when) for o in (engine.step() if engine.has_work else [])]
        last = engine.handle(Abort(request_id="a"))
        engine.scheduler.check_integrity()
        assert [o.finish_reason for o in last] == ["abort"]
        emitted += run(engine, []).get("b", [])
        assert tokens([o for o in emitted if o.request_id == "b"]) == oracle(messages[1])
        assert_nothing_held(engine)


def test_nothing_of_a_finished_request_stays_on_host_or_device():
    engine = make_engine()
    run(engine, [request("warm", [A])])
    arrays = len(jax.live_arrays())
    messages = [request(f"r{i}", [medium(40 + i, 1, 8, 8)], max_tokens=2) for i in range(40)]
    references = [sys.getrefcount(m.media[0].patches) for m in messages]
    run(engine, messages, per_step=3)
    gc.collect()
    assert [sys.getrefcount(m.media[0].patches) for m in messages] == references
    assert len(jax.live_arrays()) <= arrays
    same = request("same", [A], max_tokens=2)
    for _ in range(40):
        run(engine, [same])
    assert len(jax.live_arrays()) <= arrays
    assert_nothing_held(engine)


def test_requests_at_fault_end_alone():
    good = request("good", [[1], A])
    short = request("short", [A])
    bad = [
        request("vocab", [[1000]]),
        request("long", [[1] * 200]),
        request("empty", []),
        request("wild placeholder", [[IMAGE]]),
        replace_media(short, "grid", grid_thw=(1, 3, 4)),
        replace_media(short, "bytes", patches=b"123"),
        replace_media(short, "span", starts=(5,)),
        replace_media(short, "spans", starts=()),
        request("frame", [medium(9, 1, 20, 20)]),
        request("tokens", [[1]], max_tokens=0),
        request("bias", [[1]], logit_bias=tuple((i, 1.0) for i in range(301))),
        request("stops", [[1]], stop_token_ids=tuple(range(17)), min_tokens=1),
    ]
    engine = make_engine()
    outputs = run(engine, [good, *bad])
    assert tokens(outputs["good"]) == oracle(good)
    for message in bad:
        (output,) = outputs[message.request_id]
        assert output.finish_reason == "error", message.request_id
        assert output.error
    assert_nothing_held(engine)


def replace_media(message, request_id, **fields):
    """The request with its only medium changed."""
    changed = msgspec.structs.replace(message.media[0], **fields)
    return msgspec.structs.replace(message, request_id=request_id, media=(changed,))
