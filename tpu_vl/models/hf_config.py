"""Reads values from a checkpoint's config.json: each missing or unfit one is an error by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_vl.errors import ConfigError


@dataclass(frozen=True)
class Section:
    """One dict of a config.json.

    Args:
        values: the dict.
        name: where it stands, for messages: "config.json" or "config.json: text_config".
    """

    values: Mapping[str, Any]
    name: str

    def has(self, key: str) -> bool:
        """Whether the key is present with a value."""
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """The value as it stands.

        Raises:
            ConfigError: the key is missing or null.
        """
        if not self.has(key):
            raise ConfigError(f"{self.name} lacks {key!r}: use a complete checkpoint folder")
        return self.values[key]

    def section(self, key: str) -> "Section":
        """The dict under a key."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise self._unfit(key, "a dict")
        return Section(value, f"{self.name}: {key}")

    def size(self, key: str) -> int:
        """A whole number >= 1."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._unfit(key, "a whole number >= 1")
        return value

    def number(self, key: str) -> float:
        """A number > 0."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._unfit(key, "a number > 0")
        return float(value)

    def indices(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers >= 0."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
        ):
            raise self._unfit(key, "a list of whole numbers >= 0")
        return tuple(value)

    def token_id(self, key: str) -> int:
        """A token id: a whole number >= 0."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._unfit(key, "a whole number >= 0")
        return value

    def must_be(self, key: str, *supported: Any) -> None:
        """Checks that the key is absent or has one of the supported values.

        Raises:
            ConfigError: another value; the model would compute something else.
        """
        if self.has(key) and self.values[key] not in supported:
            raise self._unfit(key, " or ".join(repr(s) for s in supported))

    def _unfit(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: {key} is {self.values.get(key)!r}; only {wanted} is supported"
        )
