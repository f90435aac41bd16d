"""Rendering in the sandbox: content forms, allowed arguments, refusals."""

import pytest

from tests.chat.test_tokenizer import FOLDER, TOKENIZER
from tpu_vl.chat.guard import TextGuard
from tpu_vl.chat.template import ChatTemplate
from tpu_vl.errors import CheckpointError, RequestError
from tpu_vl.types import MediaKind, MediaPart, Message, TextPart

TEMPLATE = ChatTemplate.from_folder(FOLDER)


def text(value):
    return TextPart(text=value)


def image(kind: MediaKind = "image"):
    return MediaPart(kind=kind, urls=("data:,",), param="messages.[0].content.[0]")


def turn(role, *parts):
    return Message(role=role, parts=tuple(text(p) if isinstance(p, str) else p for p in parts))


def render(*messages, template=TEMPLATE, **options):
    guard = TextGuard(TOKENIZER.special_ids)
    given = template.render(messages, guard, **{"kwargs": {}, **options})
    return guard.restore(given)


def test_parts_keep_their_order():
    shown = render(turn("user", "A", image(), "B", image("video"), "C"))
    pad = "<|vision_start|><|{}_pad|><|vision_end|>".format
    assert f"user\nA{pad('image')}B{pad('video')}C<|im_end|>" in shown


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_string_and_a_list_of_text_are_the_same(role):
    assert render(turn(role, "x y")) == render(turn(role, "x ", "y"))


def test_string_methods_of_a_template_work_on_lists_of_text():
    template = ChatTemplate("{% for m in messages %}{{ m.content.strip() }}{% endfor %}")
    assert render(turn("system", " a ", "b "), template=template) == "a b"


@pytest.mark.parametrize("parts", [(), ("",), ("", "")])
def test_empty_and_missing_texts_are_kept_as_empty_turns(parts):
    shown = render(turn("system", *parts), turn("user", "", image()))
    assert shown.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|vision_start|>")


def test_labels_count_on_over_turns_and_videos_apart():
    turns = (
        turn("user", image(), image()),
        turn("assistant", "ok"),
        turn("user", image("video"), image()),
    )
    labels = ("Picture 1: ", "Picture 2: ", "Video 1: ", "Picture 3: ")
    with_labels = render(*turns, kwargs={"add_vision_id": True})
    assert [label for label in labels if label in with_labels] == list(labels)
    for label in labels:
        with_labels = with_labels.replace(label, "")
    assert with_labels == render(*turns) == render(*turns, kwargs={"add_vision_id": False})


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "add_generation_prompt", "nonsense"]
)
def test_arguments_that_are_not_the_templates_own_are_refused(name):
    with pytest.raises(RequestError, match=f"{name}.*add_vision_id") as caught:
        render(turn("user", "x"), kwargs={name: True})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_client_arguments_are_plain_text():
    template = ChatTemplate("{{ note }}<|im_end|>")
    guard = TextGuard(TOKENIZER.special_ids)
    shown = template.render((turn("user", "x"),), guard, kwargs={"note": "<|im_end|>"})
    assert shown.count("<|im_end|>") == 1


def test_the_prompt_ends_as_asked():
    assert render(turn("user", "x")).endswith("<|im_start|>assistant\n")
    assert render(turn("user", "x"), add_generation_prompt=False).endswith("x<|im_end|>\n")


@pytest.mark.parametrize("tail", ["The sha", "The shape is ", "a<|im_end|>"])
def test_the_last_message_is_continued_where_it_ends(tail):
    shown = render(turn("user", "x"), turn("assistant", tail), continue_final_message=True)
    assert shown.endswith(f"<|im_start|>assistant\n{tail}")


def test_a_template_that_hides_the_last_message_cannot_continue_it():
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="continue_final_message"):
        render(
            turn("user", "x"),
            turn("assistant", "y"),
            template=template,
            continue_final_message=True,
        )


def test_a_refusal_of_the_template_is_the_clients_error():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        render(turn("user", "x"), template=template)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    with pytest.raises(RequestError):
        render(turn("user", "x"), template=ChatTemplate(source))


def test_tags_of_training_and_loops_render():
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
    )
    assert render(turn("user", "x"), turn("assistant", "<é>"), template=template) == '"<é>"'


def test_where_a_template_is_found(tmp_path):
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTemplate.from_folder(tmp_path)
    config = '{"chat_template": "C{{ eos_token }}", "eos_token": {"content": "E"}}'
    (tmp_path / "tokenizer_config.json").write_text(config)
    assert render(turn("user", "x"), template=ChatTemplate.from_folder(tmp_path)) == "CE"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "B"}')
    assert render(turn("user", "x"), template=ChatTemplate.from_folder(tmp_path)) == "B"
    (tmp_path / "chat_template.jinja").write_text("A")
    assert render(turn("user", "x"), template=ChatTemplate.from_folder(tmp_path)) == "A"


def test_a_template_that_does_not_parse_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="does not parse"):
        ChatTemplate("{% if %}")
