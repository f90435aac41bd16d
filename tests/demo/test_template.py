"""The chat template: expected texts, and equality with transformers' rendering."""

import pytest
from jinja2 import TemplateError

from tpu_vl.demo import CHECKPOINT
from tpu_vl.demo.talks import TalkMaker

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def text(value):
    return {"type": "text", "text": value}


def turn(role, body):
    return f"<|im_start|>{role}\n{body}<|im_end|>\n"


TABLE = {
    "string": ([{"role": "user", "content": "hi"}], turn("user", "hi")),
    "list": ([{"role": "user", "content": [text("hi")]}], turn("user", "hi")),
    "system": (
        [
            {"role": "system", "content": [text("Be"), text(" brief.")]},
            {"role": "user", "content": "hi"},
        ],
        turn("system", "Be brief.") + turn("user", "hi"),
    ),
    "turns": (
        [
            {"role": "user", "content": [{"type": "image"}, text("a")]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": [text("c")]},
        ],
        turn("user", f"{IMAGE}a") + turn("assistant", "b") + turn("user", "c"),
    ),
    "order": (
        [
            {
                "role": "user",
                "content": [
                    text("A"),
                    {"type": "image_url", "image_url": {"url": "u"}},
                    text("B"),
                    {"type": "video"},
                    text("C"),
                    {"type": "image"},
                ],
            }
        ],
        turn("user", f"A{IMAGE}B{VIDEO}C{IMAGE}"),
    ),
    "empty text": (
        [
            {"role": "system", "content": ""},
            {"role": "user", "content": [text(""), {"type": "image"}]},
        ],
        turn("system", "") + turn("user", IMAGE),
    ),
    "null": (
        [{"role": "assistant", "content": None}, {"role": "user", "content": "x"}],
        turn("assistant", "") + turn("user", "x"),
    ),
    "braces": (
        [{"role": "user", "content": "{{ 7 * 7 }} {% x %}"}],
        turn("user", "{{ 7 * 7 }} {% x %}"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(CHECKPOINT))


@pytest.mark.parametrize("name", TABLE)
def test_rendering(tokenizer, name):
    messages, expected = TABLE[name]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", TABLE)
def test_training_renders_the_same(name):
    messages, expected = TABLE[name]
    assert TalkMaker(CHECKPOINT).template.render(messages=messages) == expected


def test_vision_ids_count_on_over_the_turns(tokenizer):
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "image"}]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}]},
    ]
    labelled = tokenizer.apply_chat_template(messages, tokenize=False, add_vision_id=True)
    first = f"Picture 1: {IMAGE}Video 1: {VIDEO}Picture 2: {IMAGE}"
    last = f"Picture 3: {IMAGE}Video 2: {VIDEO}"
    assert labelled == turn("user", first) + turn("assistant", "x") + turn("user", last)
    plain = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "Picture" not in plain
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_vision_id=False) == plain


def test_an_unknown_part_is_refused(tokenizer):
    with pytest.raises(TemplateError, match="content part"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "audio"}]}], tokenize=False
        )
