"""Typed reading of JSON fields: null means absent, a wrong value is a 400 that names the field."""

from collections.abc import Mapping
from typing import Any

from tpu_vl.errors import RequestError

Body = Mapping[str, Any]


def shown(value: object, limit: int = 60) -> str:
    """A value as an error message may show it: its beginning, never a whole payload."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def wrong(path: str, value: object, expected: str) -> RequestError:
    """The error of a field that has the wrong type or lies outside its range."""
    return RequestError(f"{path} is {shown(value)}; expected {expected}", param=path)


def clean(text: str) -> str:
    """The text with unpaired surrogates, which no tokenizer takes, shown as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def read_bool(body: Body, name: str, default: bool) -> bool:
    """A boolean field."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def read_int(body: Body, name: str, *, low: int, high: int | None = None) -> int | None:
    """An integer field in [low, high], or None when absent."""
    value = body.get(name)
    if value is None:
        return None
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):
        raise wrong(name, value, f"an integer {_range(low, high)}")
    return value


def read_float(
    body: Body, name: str, *, low: float, high: float | None = None, open_low: bool = False
) -> float | None:
    """A finite number in [low, high] (above low if `open_low`), or None when absent."""
    value = body.get(name)
    if value is None:
        return None
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared before it is converted: an integer may be too large for a float.
    if (
        not ok
        or not low <= value <= (1e30 if high is None else high)
        or (open_low and value == low)
    ):
        span = f"above {low}" if open_low and high is None else _range(low, high, open_low)
        raise wrong(name, value, f"a number {span}")
    return float(value)


def read_str(body: Body, name: str) -> str | None:
    """A string field, or None when absent."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    return clean(value)


def read_object(body: Body, name: str) -> dict[str, Any]:
    """An object field; {} when absent."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def _range(low: float, high: float | None, open_low: bool = False) -> str:
    if high is None:
        return f">= {low}"
    return f"in {'(' if open_low else '['}{low}, {high}]"
