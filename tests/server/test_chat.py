"""Bodies of chat requests: what each field becomes, and what is refused by name."""

import pytest

from tpu_vl.errors import RequestError
from tpu_vl.server.chat import parse_chat
from tpu_vl.types import MediaPart, SamplingParams, TextPart

USER = {"role": "user", "content": "hi"}


def parse(defaults=None, **fields):
    return parse_chat({"messages": [USER], **fields}, defaults or {}, None)


def sampling(defaults=None, **fields):
    return parse(defaults, **fields).request.sampling


def part(**fields):
    call = parse(messages=[{"role": "user", "content": [fields]}])
    return call.request.messages[0].parts[0]


def test_nothing_set_gives_the_defaults():
    call = parse()
    assert call.request.sampling == SamplingParams()
    assert (call.num_choices, call.stream, call.model) == (1, False, None)


def test_defaults_of_the_checkpoint_hold_where_the_client_sends_null():
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    nulls = dict.fromkeys(defaults)
    for fields in ({}, nulls):
        got = sampling({**defaults, "do_sample": True}, **fields)
        assert (got.temperature, got.top_p, got.top_k) == (0.7, 0.8, 20)
        assert got.repetition_penalty == 1.05
    assert sampling(defaults, temperature=0, top_k=-1, top_p=1).top_k == 0


def test_a_checkpoint_that_does_not_sample_is_greedy_until_asked():
    assert sampling({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert sampling({"do_sample": False}, temperature=0.3).temperature == 0.3


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"temperature": 2}, "temperature", 2.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": 11}, "seed", 11),
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": []}, "stop", ()),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [4]}, "stop_token_ids", (4,)),
        ({"presence_penalty": -1}, "presence_penalty", -1.0),
        ({"frequency_penalty": 2}, "frequency_penalty", 2.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"logit_bias": {"5": -100}}, "logit_bias", {5: -100.0}),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
        ({"logprobs": False}, "logprobs", None),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"include_stop_str_in_output": True}, "include_stop_str", True),
    ],
)
def test_each_sampling_field_does_what_it_says(fields, name, value):
    assert getattr(sampling(**fields), name) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.[0].content"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages.[0].tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"mm_processor_kwargs": {"size": {}}}, "mm_processor_kwargs.size"),
        ({"continue_final_message": True}, "messages"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_wrong_values_are_named(fields, param):
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tools": [{}], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": {}},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {"echo": True},
        {"logits_processors": ["x"]},
        {"reasoning_effort": "high"},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"cache_salt": "x"},
        {"truncate_prompt_tokens": 4},
        {"return_token_ids": True},
        {"modalities": ["text", "audio"]},
        {"chat_template": "{{ 1 }}"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_would_change_the_answer_are_refused_not_ignored(fields):
    with pytest.raises(RequestError, match=r"not supported|only text") as caught:
        parse(**fields)
    assert caught.value.param in fields


def test_null_harmless_and_unknown_fields_are_tolerated():
    parse(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        echo=False,
        bad_words=None,
        reasoning_effort=None,
        user="someone",
        metadata={"a": "b"},
        something_new=[1],
        parallel_tool_calls=True,
        modalities=["text"],
    )
    parse(tools=[{"type": "function"}], tool_choice="none")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, "image"),
        ({"type": "image_url", "image_url": "u", "uuid": "x"}, "image"),
        ({"type": "input_image", "image_url": "u"}, "image"),
        ({"type": "image", "image": "u"}, "image"),
        ({"type": "image", "url": "u"}, "image"),
        ({"type": "video_url", "video_url": {"url": "u"}}, "video"),
        ({"type": "input_video", "video_url": {"url": "u"}}, "video"),
        ({"type": "video", "video": "u"}, "video"),
        ({"type": "video", "video": ["u"]}, "video"),
    ],
)
def test_each_form_of_a_media_part_is_read(fields, kind):
    got = part(**fields)
    assert isinstance(got, MediaPart)
    assert (got.kind, got.urls, got.param) == (kind, ("u",), "messages.[0].content.[0]")


def test_processor_options_of_the_request_and_of_the_part():
    content = [
        {"type": "image_url", "image_url": {"url": "u"}, "max_pixels": 4096},
        {"type": "video", "video": ["a", "b"], "fps": 3},
    ]
    messages = [{"role": "user", "content": content}]
    call = parse(messages=messages, mm_processor_kwargs={"fps": 1, "max_pixels": 9, "x": None})
    image, video = (p for p in call.request.messages[0].parts if isinstance(p, MediaPart))
    assert image.options == {"max_pixels": 4096}
    assert video.options == {"max_pixels": 9, "fps": 3}
    assert video.urls == ("a", "b")


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "input_audio", "input_audio": {}},
        {"type": "image_url"},
        {"type": "image_url", "image_url": None, "uuid": "cached"},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image", "image": ["a", "b"]},
        {"type": "video", "video": []},
        {"type": "video", "video": ["a", None]},
        {"type": "text"},
        {"type": ["text"]},
        {"text": "no type"},
    ],
)
def test_parts_that_are_not_served_are_named_never_dropped(fields):
    with pytest.raises(RequestError, match=r"messages\.\[0\]\.content\.\[0\]"):
        part(**fields)


def test_errors_never_echo_a_payload():
    with pytest.raises(RequestError) as caught:
        parse(messages=[{"role": "user", "content": [{"type": "A" * 5000}]}])
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("roles", "shown"),
    [
        (("developer", "user"), ("system", "user")),
        (("developer", "system", "user"), ("system", "system", "user")),
        (("user", "developer", "user"), ("user", "system", "user")),
        (("system", "tool"), ("system", "tool")),
    ],
)
def test_developer_is_system_wherever_it_stands(roles, shown):
    call = parse(messages=[{"role": role, "content": "x"} for role in roles])
    assert tuple(m.role for m in call.request.messages) == shown


def test_null_content_and_reasoning_of_a_history_are_an_empty_turn():
    history = [{"role": "assistant", "content": None, "reasoning_content": "Done."}, USER]
    call = parse(messages=history)
    assert call.request.messages[0].parts == ()


def test_unpaired_surrogates_become_the_replacement_character():
    call = parse(messages=[{"role": "user", "content": "a\ud83d\ude00b\ud83d"}])
    assert call.request.messages[0].parts == (TextPart(text="a😀b�"),)


def test_the_request_id_comes_from_the_body_then_the_header_then_chance():
    body = {"messages": [USER]}
    assert parse_chat({**body, "request_id": "b"}, {}, "h").request.request_id == "b"
    assert parse_chat(body, {}, "h").request.request_id == "h"
    ids = {parse_chat(body, {}, None).request.request_id for _ in range(4)}
    assert len(ids) == 4
