"""Chat templates: a conversation to text, in a sandbox, with only the arguments it reads."""

import datetime
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpu_vl.chat.guard import TextGuard
from tpu_vl.errors import CheckpointError, RequestError
from tpu_vl.types import Message, TextPart

# Names that the server itself passes, or that select how a prompt is made: never a client's.
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
        "raise_exception",
        "strftime_now",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
    }
)


class _GenerationTag(jinja2.ext.Extension):
    """Renders `{% generation %}...{% endgeneration %}` as its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A checkpoint's chat template, compiled once; rendering is pure and thread-safe.

    Args:
        source: the Jinja text.
        tokens: named tokens that templates read (`bos_token`, `eos_token`, ...).

    Attributes:
        client_kwargs: the variables that a client may set: those the template reads, less the
            server's own.

    Raises:
        CheckpointError: the template does not parse.

    Source: `_compile_jinja_template` in transformers 5.24 utils/chat_template_utils.py.
    Deviation: text-only content is always one string, so that "x" and a list of one text part
    give the same prompt and templates that call string methods work.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not parse: {error}") from error
        self._tokens = dict(tokens or {})
        known = _RESERVED | set(environment.globals)
        self.client_kwargs = frozenset(names - known)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTemplate":
        """The template of a checkpoint: chat_template.jinja, chat_template.json or the tokenizer's.

        Raises:
            CheckpointError: the folder has none.
        """
        folder = Path(folder)
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text()) if config_path.is_file() else {}
        tokens = {name: _literal(config[name]) for name in config if name.endswith("_token")}
        source = _find_source(folder, config)
        if source is None:
            raise CheckpointError(
                f"{folder} has no chat template; add chat_template.jinja to the folder"
            )
        return cls(source, {name: value for name, value in tokens.items() if value is not None})

    def check_kwargs(self, kwargs: Mapping[str, object]) -> None:
        """Refuses template arguments that the template does not read.

        Raises:
            RequestError: naming the argument and those that may be set.
        """
        for name in kwargs:
            if name not in self.client_kwargs:
                allowed = ", ".join(sorted(self.client_kwargs)) or "none"
                raise RequestError(
                    f"chat_template_kwargs.{name} is not an argument of this model's chat "
                    f"template; those that can be set: {allowed}",
                    param=f"chat_template_kwargs.{name}",
                )

    def render(
        self,
        messages: tuple[Message, ...],
        guard: TextGuard,
        *,
        kwargs: Mapping[str, object],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt as text, message texts guarded (`TextGuard.restore` brings them back).

        Args:
            messages: the conversation.
            guard: hides what looks like a special token in every text of the client.
            kwargs: arguments that the client sets.
            add_generation_prompt: end with the opening of an assistant turn.
            continue_final_message: end inside the last message's text.

        Raises:
            RequestError: the template refuses the conversation, or an argument is not its own.
        """
        self.check_kwargs(kwargs)
        turns = [_turn(message, guard) for message in messages]
        end_mark = ""
        if continue_final_message:
            end_mark = f"\U000f0000{secrets.token_hex(8)}\U000f0001"
            _append_text(turns[-1], end_mark)
        hidden = {k: guard.hide(v) if isinstance(v, str) else v for k, v in kwargs.items()}
        try:
            text = self._template.render(
                messages=turns,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **self._tokens,
                **hidden,
            )
        except Exception as error:
            # A template is code of the checkpoint: whatever it raises, it raised on these messages.
            reason = guard.restore(str(error)) or type(error).__name__
            raise RequestError(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error
        if not continue_final_message:
            return text
        if end_mark not in text:
            raise RequestError(
                "continue_final_message: the chat template does not show the last message",
                param="continue_final_message",
            )
        return text[: text.rindex(end_mark)]


def _turn(message: Message, guard: TextGuard) -> dict[str, Any]:
    if all(isinstance(part, TextPart) for part in message.parts):
        text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
        return {"role": message.role, "content": guard.hide(text)}
    parts = [
        {"type": "text", "text": guard.hide(part.text)}
        if isinstance(part, TextPart)
        else {"type": part.kind, part.kind: ""}
        for part in message.parts
    ]
    return {"role": message.role, "content": parts}


def _append_text(turn: dict[str, Any], text: str) -> None:
    if isinstance(turn["content"], str):
        turn["content"] += text
    else:
        turn["content"].append({"type": "text", "text": text})


def _literal(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _find_source(folder: Path, config: dict) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    if (folder / "chat_template.json").is_file():
        return json.loads((folder / "chat_template.json").read_text())["chat_template"]
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default")
    return source
