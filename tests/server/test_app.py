"""The whole path in one process: HTTP in, engine messages, HTTP out."""

import asyncio
import json

import numpy as np
import pytest

from tests.server.fakes import (
    EOS,
    TOKENIZER,
    frames_part,
    image_part,
    in_loop,
    logprobs_of,
    png,
    say,
    server_config,
    serving,
    text_part,
)
from tpu_vl.engine.messages import Output
from tpu_vl.server.state import Capability, Progress


def events_of(response):
    """Parsed chunks of a stream; the last line must be [DONE]."""
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@in_loop
async def test_a_whole_answer_has_the_shape_of_openai():
    async with serving(say("red circle é")) as app:
        answer = (await app.chat()).json()
        assert answer["object"] == "chat.completion"
        (choice,) = answer["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "red circle é",
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["total_tokens"] == (
            answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
        )
        assert answer["model"] == "tiny"
        assert answer["system_fingerprint"]
        assert app.nothing_held()


@in_loop
async def test_a_stream_names_the_role_once_and_ends_apart():
    async with serving(say("red circle")) as app:
        chunks = events_of(await app.chat(stream=True))
        assert all(c["object"] == "chat.completion.chunk" and c["choices"] for c in chunks)
        deltas = [c["choices"][0]["delta"] for c in chunks]
        assert deltas[0]["role"] == "assistant"
        assert deltas[0]["content"]
        assert not any("role" in delta for delta in deltas[1:])
        assert deltas[-1] == {}
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]
        assert "".join(d.get("content", "") for d in deltas) == "red circle"
        assert not any(c.get("usage") for c in chunks)


@in_loop
async def test_usage_is_the_same_in_every_mode_and_its_chunk_is_last_and_empty():
    parts = (text_part("A"), image_part(), text_part("B"), frames_part(4))
    async with serving(say("red")) as app:
        whole = (await app.text(*parts)).json()["usage"]
        with_usage = {"include_usage": True}
        chunks = events_of(await app.text(*parts, stream=True, stream_options=with_usage))
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole
        assert [c for c in chunks if c["usage"] is not None] == [chunks[-1]]
        no_usage = events_of(await app.text(*parts, stream=True))
        assert all("usage" not in c and c["choices"] for c in no_usage)
        running = events_of(
            await app.text(*parts, stream=True, stream_options={"continuous_usage_stats": True})
        )
        counts = [c["usage"]["completion_tokens"] for c in running]
        assert counts == sorted(counts)
        assert running[-1]["usage"] == whole
        sent = np.frombuffer(app.engine.requests[0].token_ids, np.int32)
        assert whole["prompt_tokens"] == len(sent)
        pads = {k: TOKENIZER.special_id(f"<|{k}_pad|>") for k in ("image", "video")}
        details = whole["prompt_tokens_details"]
        assert details["image_tokens"] == np.count_nonzero(sent == pads["image"]) == 4
        assert details["video_tokens"] == np.count_nonzero(sent == pads["video"]) == 8
        text_only = (await app.text(text_part("A"), text_part("B"))).json()["usage"]
        assert text_only["prompt_tokens"] < whole["prompt_tokens"] - 12


@in_loop
async def test_cached_tokens_are_those_the_engine_reports():
    def script(add):
        yield Output(
            request_id=add.request_id,
            token_ids=(EOS,),
            finish_reason="stop",
            stop_token_id=EOS,
            num_cached_tokens=7,
        )

    async with serving(script) as app:
        usage = (await app.chat()).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 7


@in_loop
async def test_media_reach_the_engine_in_prompt_order_with_their_own_rows():
    """Images and videos of one colour each, over two turns: every span has its own pixels."""
    first = [frames_part(4), text_part("x"), image_part(png(64, 96, (9, 9, 9)))]
    second = [image_part(png(96, 64, (77, 77, 77))), text_part("y"), frames_part(2, 96)]
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": second},
    ]
    async with serving(say("red")) as app:
        assert (await app.chat({"messages": turns})).status_code == 200
        (add,) = app.engine.requests
        assert [m.kind for m in add.media] == ["video", "image", "image", "video"]
        assert [m.grid_thw for m in add.media] == [(2, 4, 4), (1, 6, 4), (1, 4, 6), (1, 6, 6)]
        assert set(add.media[1].patches) == {9}
        assert set(add.media[2].patches) == {77}
        ids = np.frombuffer(add.token_ids, np.int32)
        starts = [start for medium in add.media for start in medium.starts]
        assert starts == sorted(starts)
        for medium in add.media:
            pad = TOKENIZER.special_id(f"<|{medium.kind}_pad|>")
            cells = medium.grid_thw[1] * medium.grid_thw[2] // 4
            for start in medium.starts:
                assert (ids[start : start + cells] == pad).all()
                assert ids[start - 1] != pad
                assert ids[start + cells] != pad
        positions = np.frombuffer(add.positions, np.int32).reshape(3, -1)
        assert positions.shape[1] == len(ids)
        assert positions[0, -1] == len(ids) - 1 + add.position_delta


@in_loop
async def test_the_order_of_parts_is_the_order_of_the_prompt():
    async with serving(say("red")) as app:
        parts = (text_part("A"), image_part(), text_part("B"), image_part(), text_part("C"))
        assert (await app.text(*parts)).status_code == 200
        ids = np.frombuffer(app.engine.requests[0].token_ids, np.int32).tolist()
        shown = TOKENIZER.decode(ids, skip_special_tokens=False).replace("<|image_pad|>", "")
        assert "user\nA<|vision_start|><|vision_end|>B<|vision_start|><|vision_end|>C" in shown


@in_loop
async def test_several_choices_have_seeds_of_their_own():
    async with serving(say("red")) as app:
        answer = (await app.chat(n=3, seed=2**32 - 1, temperature=1)).json()
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        assert {c["message"]["content"] for c in answer["choices"]} == {"red"}
        seeds = [add.sampling.seed for add in app.engine.requests]
        assert seeds == [2**32 - 1, 0, 1]
        one = (await app.chat()).json()["usage"]
        assert answer["usage"]["prompt_tokens"] == one["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == 3 * one["completion_tokens"]
        chunks = events_of(await app.chat(n=2, stream=True))
        roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
        assert sorted(roles) == [0, 1]


@in_loop
async def test_log_probabilities_have_bytes_and_alternatives():
    async with serving(say("é")) as app:
        fields = {"logprobs": True, "top_logprobs": 2}
        answer = (await app.chat(**fields)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        assert bytes(b for c in content[:-1] for b in c["bytes"]).decode() == "é"
        assert [len(c["top_logprobs"]) for c in content] == [2] * len(content)
        chunks = events_of(await app.chat(**fields, stream=True))
        streamed = [
            entry
            for chunk in chunks
            for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", ())
        ]
        assert streamed == content
        assert (await app.chat()).json()["choices"][0]["logprobs"] is None


@in_loop
async def test_impossible_tokens_keep_the_answer_valid_json():
    def script(add):
        (entry,) = logprobs_of(add, EOS)
        yield Output(
            request_id=add.request_id,
            token_ids=(EOS,),
            logprobs=(type(entry)(logprob=float("-inf")),),
            finish_reason="stop",
            stop_token_id=EOS,
        )

    async with serving(script) as app:
        answer = (await app.chat(logprobs=True)).json()
        assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_stop_string_ends_the_answer_and_the_engines_work(stream):
    async with serving(say("a red circle" * 20)) as app:
        fields = {"stop": ["circle"], "logprobs": True}
        response = await app.chat(stream=stream, **fields)
        if stream:
            chunks = events_of(response)
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            end = chunks[-1]["choices"][0]
        else:
            end = response.json()["choices"][0]
            text = end["message"]["content"]
            seen = [entry["token"] for entry in end["logprobs"]["content"]]
            assert "".join(seen) == "a red"  # " circle" is one token: no part of it is reported
        assert text == "a red "
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", "circle")
        await settled(app)
        assert len(app.engine.aborted) == 1


@in_loop
async def test_a_stop_string_that_never_comes_changes_nothing():
    async with serving(say("a zz <tool_call>{}</tool_call>")) as app:
        plain = await app.chat(stream=True)
        stopped = await app.chat(stream=True, stop=["zzz"])
        texts = [
            "".join(c["choices"][0]["delta"].get("content", "") for c in events_of(r))
            for r in (plain, stopped)
        ]
        assert texts[0] == texts[1] == "a zz <tool_call>{}</tool_call>"


@in_loop
async def test_a_stop_inside_an_unfinished_call_keeps_the_text_before_it():
    async with serving(say('hello <tool_call>{"name": "x"')) as app:
        (choice,) = (await app.chat(stop=["name"])).json()["choices"]
        assert choice["message"]["content"] == 'hello <tool_call>{"'
        assert choice["finish_reason"] == "stop"


@in_loop
async def test_stop_tokens_end_the_answer_and_stay_out_of_it():
    dot = TOKENIZER.encode(".")[0]
    async with serving(say("a. b")) as app:
        (choice,) = (await app.chat(stop_token_ids=[dot])).json()["choices"]
        assert (choice["message"]["content"], choice["stop_reason"]) == ("a", dot)
        shown = await app.chat(stop_token_ids=[dot], include_stop_str_in_output=True)
        assert shown.json()["choices"][0]["message"]["content"] == "a."
        stops = app.engine.requests[0].sampling.stop_token_ids
        assert set(stops) == {dot, *TOKENIZER.eos_ids}


@in_loop
async def test_ignoring_the_end_token_and_special_tokens_in_the_text():
    async with serving(say("a")) as app:
        body = {"ignore_eos": True, "max_tokens": 2}
        (choice,) = (await app.chat(**body)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "length")
        assert app.engine.requests[0].sampling.stop_token_ids == ()
        (choice,) = (await app.chat(**body, skip_special_tokens=False)).json()["choices"]
        assert choice["message"]["content"] == "a<|im_end|>"


@in_loop
async def test_sampling_reaches_the_engine_as_asked():
    asked = {
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 3,
        "min_tokens": 1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    async with serving(say("a")) as app:
        await app.chat(**asked, logit_bias={"7": 2}, max_tokens=5, logprobs=True, top_logprobs=4)
        got = app.engine.requests[0].sampling
        assert {name: getattr(got, name) for name in asked} == asked
        assert (got.logit_bias, got.max_tokens, got.num_logprobs) == (((7, 2.0),), 5, 4)


@in_loop
async def test_the_answer_limit_is_cut_to_the_context_that_is_left():
    async with serving(say("a")) as app:
        for limit in (10**9, None):
            usage = (await app.chat(max_tokens=limit)).json()["usage"]
            left = 2048 - usage["prompt_tokens"]
            assert app.engine.requests[-1].sampling.max_tokens == left


@in_loop
async def test_template_arguments_reach_the_template():
    async with serving(say("a")) as app:
        plain = (await app.text(image_part())).json()["usage"]["prompt_tokens"]
        kwargs = {"add_vision_id": True}
        labelled = await app.text(image_part(), chat_template_kwargs=kwargs)
        label = len(TOKENIZER.encode("user\nPicture 1: ")) - len(TOKENIZER.encode("user\n"))
        assert labelled.json()["usage"]["prompt_tokens"] == plain + label
        refused = await app.chat(chat_template_kwargs={"tokenize": False})
        assert refused.status_code == 400


@in_loop
async def test_continuing_the_last_message():
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The sha"}]
    async with serving(say("pe")) as app:
        await app.chat({"messages": turns, "continue_final_message": True})
        ids = np.frombuffer(app.engine.requests[0].token_ids, np.int32).tolist()
        assert TOKENIZER.decode(ids, skip_special_tokens=False).endswith("assistant\nThe sha")


@in_loop
async def test_errors_of_the_engine_are_500_and_in_a_stream_an_event():
    def script(add):
        yield Output(request_id=add.request_id, token_ids=tuple(TOKENIZER.encode("a")))
        yield Output(request_id=add.request_id, finish_reason="error", error="lost a page")

    async with serving(script) as app:
        whole = await app.chat()
        assert (whole.status_code, whole.json()["error"]["message"]) == (500, "lost a page")
        stream = await app.chat(stream=True)
        assert stream.status_code == 200
        last = stream.text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.split("data: ")[1])["error"]["message"] == "lost a page"
        assert app.nothing_held()
        assert b'finished_reason="error",model_name="tiny"} 2.0' in (await scrape(app))


async def scrape(app):
    return (await app.http.get("/metrics")).content


async def settled(app):
    for _ in range(200):
        if app.nothing_held():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something is still held")


@in_loop
async def test_unforeseen_errors_are_500_without_their_text(monkeypatch, caplog):
    async with serving(say("a")) as app:
        monkeypatch.setattr(app.frontend, "_build", lambda *_: 1 / 0)
        response = await app.chat()
        assert response.status_code == 500
        assert "division" not in response.text
        assert response.json()["error"]["type"] == "internal_error"
        assert "ZeroDivisionError" in caplog.text
        assert app.nothing_held()


@in_loop
async def test_a_dead_engine_fails_health_liveness_and_requests():
    async with serving(say("a")) as app:
        assert (await app.http.get("/health")).status_code == 200
        app.client.dead = "the loop ended"
        assert (await app.http.get("/health")).status_code == 503
        assert (await app.http.get("/live")).status_code == 500
        assert (await app.chat()).json()["error"]["code"] == "engine_dead"


@in_loop
async def test_until_it_is_ready_the_server_says_how_far_it_is():
    async with serving(say("a")) as app:
        model, app.state.model = app.state.model, None
        app.state.progress = Progress(phase="programs", done=3, total=10)
        health = await app.http.get("/health")
        assert health.status_code == 503
        assert int(health.headers["retry-after"]) > 0
        shown = {k: health.json()[k] for k in ("status", "phase", "done", "total")}
        assert shown == {"status": "loading", "phase": "programs", "done": 3, "total": 10}
        for response in (await app.chat(), await app.http.get("/v1/models")):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "not_ready"
            assert "retry-after" in response.headers
        for path in ("/live", "/version", "/metrics"):
            assert (await app.http.get(path)).status_code == 200
        app.state.model = model
        assert (await app.chat()).status_code == 200


@in_loop
async def test_the_models_list_says_what_is_served():
    config = server_config(notice="knows shapes only")
    async with serving(say("a"), config) as app:
        cards = (await app.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "alias"]
        assert (cards[0]["root"], cards[0]["max_model_len"]) == ("bundled", 2048)
        assert cards[0]["modalities"] == ["text", "image", "video"]
        assert cards[0]["notice"] == "knows shapes only"
        assert (await app.http.get("/v1/models/alias")).json() == cards[1]
        assert (await app.http.get("/v1/models/other")).status_code == 404
        assert (await app.chat(model="alias")).json()["model"] == "alias"


@in_loop
async def test_a_key_guards_v1_only():
    async with serving(say("a"), server_config(api_key="secret")) as app:
        assert (await app.chat()).status_code == 401
        app.http.headers["Authorization"] = "Bearer wrong"
        refused = await app.chat()
        assert refused.json()["error"]["code"] == "invalid_api_key"
        app.http.headers["Authorization"] = "Bearer secret"
        assert (await app.chat()).status_code == 200
        del app.http.headers["Authorization"]
        assert (await app.http.get("/health")).status_code == 200


@in_loop
async def test_the_request_id_comes_back():
    async with serving(say("a")) as app:
        app.http.headers["x-request-id"] = "abc"
        first, second = await asyncio.gather(app.chat(), app.chat())
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == "abc"
        assert first.json()["id"] == "chatcmpl-abc"
        assert len({add.request_id for add in app.engine.requests}) == 2


@in_loop
async def test_a_full_queue_answers_503_with_retry_after():
    def slow(add):
        for _ in range(30):
            yield Output(request_id=add.request_id, token_ids=tuple(TOKENIZER.encode("a")))
        yield Output(request_id=add.request_id, finish_reason="length")

    async with serving(slow, max_open_requests=2) as app:
        answers = await asyncio.gather(*(app.chat() for _ in range(6)))
        codes = sorted(a.status_code for a in answers)
        assert codes == [200, 200, 503, 503, 503, 503]
        refused = next(a for a in answers if a.status_code == 503)
        assert refused.headers["retry-after"] == "1"
        assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
        assert (await app.chat(n=3)).status_code == 400
        assert app.nothing_held()


@in_loop
async def test_many_requests_with_and_without_images_at_once():
    async with serving(say("ok"), max_open_requests=200) as app:
        app.client._capacity = 200
        media = [
            app.text(image_part(png(64, 32 + 32 * (i % 4))), text_part(f"{i}")) for i in range(50)
        ]
        texts = [app.chat({"messages": [{"role": "user", "content": f"{i}"}]}) for i in range(50)]
        answers = await asyncio.gather(*media, *texts)
        assert {a.status_code for a in answers} == {200}
        assert app.nothing_held()


@pytest.mark.parametrize("kind", ["image", "video"])
@in_loop
async def test_media_to_a_model_that_reads_none_are_refused_by_path(kind):
    part = image_part() if kind == "image" else frames_part()
    reason = {"image": "--text-model-only is set"}
    capability = Capability(reason_by_modality=reason)
    async with serving(say("a"), capability=capability, processor=None) as app:
        error = (await app.text(text_part("x"), part)).json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "messages.[0].content.[1]"
        assert reason.get(kind, "reads text only") in error["message"]
        assert (await app.chat()).status_code == 200
        assert app.engine.requests[-1].positions == b""


@in_loop
async def test_video_to_a_model_of_images_only():
    async with serving(say("a"), capability=Capability(modalities=("image",))) as app:
        assert (await app.text(image_part())).status_code == 200
        assert (await app.text(frames_part())).status_code == 400
