"""Messages of a chat request: roles and content parts, in the order in which they were sent."""

from typing import Any

from tpu_vl.errors import RequestError
from tpu_vl.server.fields import clean, shown, wrong
from tpu_vl.types import MediaKind, MediaPart, Message, TextPart
from tpu_vl.vision.options import IMAGE_OPTIONS, VIDEO_OPTIONS

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

_TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Part type -> (what it is, fields that may hold the address).
_MEDIA_TYPES: dict[str, tuple[MediaKind, tuple[str, ...]]] = {
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url", "input_image")),
    "image": ("image", ("image", "image_url", "url")),
    "video_url": ("video", ("video_url",)),
    "input_video": ("video", ("video_url", "input_video")),
    "video": ("video", ("video", "video_url", "url")),
}
_KNOWN_TYPES = ", ".join([*_TEXT_TYPES, *_MEDIA_TYPES])

OPTIONS: dict[MediaKind, frozenset[str]] = {"image": IMAGE_OPTIONS, "video": VIDEO_OPTIONS}


def parse_messages(value: object, mm_kwargs: dict[str, Any]) -> tuple[Message, ...]:
    """The conversation of a request.

    Args:
        value: the `messages` field.
        mm_kwargs: processor options for all media, checked by `check_mm_kwargs`.

    Raises:
        RequestError: naming the message and the part.
    """
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of at least one message")
    return tuple(_parse_message(m, f"messages.[{i}]", mm_kwargs) for i, m in enumerate(value))


def check_mm_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuses processor options of the whole request that no kind of media has.

    Their values are checked where a medium is processed, against the server's caps.

    Raises:
        RequestError: naming the option.
    """
    for name in kwargs:
        if name not in VIDEO_OPTIONS:
            path = f"mm_processor_kwargs.{name}"
            raise RequestError(
                f"{path} is not an option; those that can be set: "
                f"{', '.join(sorted(VIDEO_OPTIONS))}",
                param=path,
            )


def _parse_message(value: object, path: str, mm_kwargs: dict[str, Any]) -> Message:
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{path}.role", role, f"one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise RequestError(
                f"{path}.{name} is not supported: send the history as text", param=f"{path}.{name}"
            )
    parts = _parse_content(value.get("content"), f"{path}.content", mm_kwargs)
    return Message(role=ROLES[role], parts=parts)  # pyright: ignore[reportArgumentType]


def _parse_content(
    value: object, path: str, mm_kwargs: dict[str, Any]
) -> tuple[TextPart | MediaPart, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (TextPart(text=clean(value)),)
    if not isinstance(value, list):
        raise wrong(path, value, "a string or a list of parts")
    return tuple(_parse_part(part, f"{path}.[{i}]", mm_kwargs) for i, part in enumerate(value))


def _parse_part(value: object, path: str, mm_kwargs: dict[str, Any]) -> TextPart | MediaPart:
    if isinstance(value, str):
        return TextPart(text=clean(value))
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with a type")
    kind = value.get("type")
    if isinstance(kind, str) and kind in _TEXT_TYPES:
        text = value.get(_TEXT_TYPES[kind])
        if not isinstance(text, str):
            raise wrong(f"{path}.{_TEXT_TYPES[kind]}", text, "a string")
        return TextPart(text=clean(text))
    if isinstance(kind, str) and kind in _MEDIA_TYPES:
        return _parse_media(value, kind, path, mm_kwargs)
    raise RequestError(
        f"{path}.type is {shown(kind)}; supported part types: {_KNOWN_TYPES}", param=path
    )


def _parse_media(
    part: dict[str, Any], part_type: str, path: str, mm_kwargs: dict[str, Any]
) -> MediaPart:
    kind, names = _MEDIA_TYPES[part_type]
    address, options = None, dict(part)
    for name in names:
        if part.get(name) is not None:
            address = part[name]
            break
    if isinstance(address, dict):
        options |= address
        address = address.get("url")
    listed = address if isinstance(address, list) and kind == "video" else [address]
    urls = tuple(url for url in listed if isinstance(url, str) and url)
    if not urls or len(urls) < len(listed):
        expected = "an address, or a list of frame addresses" if kind == "video" else "an address"
        raise RequestError(f"{path}.{names[0]} has no url; expected {expected}", param=path)
    own = {k: v for k, v in options.items() if k in VIDEO_OPTIONS and v is not None}
    chosen = {k: v for k, v in {**mm_kwargs, **own}.items() if k in OPTIONS[kind]}
    return MediaPart(kind=kind, urls=urls, param=path, options=chosen)
