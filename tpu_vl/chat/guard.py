"""Keeps what a client wrote apart from the special tokens that the template writes."""

import re
import secrets
from collections.abc import Iterable


class TextGuard:
    """Hides literals of special tokens in a client's text until the prompt has been split.

    A literal is replaced by a mark that nobody can guess, and so is a start or an end of the text
    that could complete one with its neighbour ("<|im_" in one part, "start|>" in the next).

    Args:
        literals: the special tokens' texts.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = sorted(literals, key=len, reverse=True)
        self._nonce = secrets.token_hex(8)
        self._hidden: list[str] = []
        self._pattern = re.compile("|".join(map(re.escape, self._literals)) or r"(?!)")
        self._mark_pattern = re.compile(f"\U000f0000{self._nonce}:([0-9]+)\U000f0001")

    def hide(self, text: str) -> str:
        """The text with marks in place of everything that could become a special token."""
        head = self._head_length(text)
        tail = self._tail_length(text[head:])
        middle = text[head : len(text) - tail]
        return (
            self._mark(text[:head])
            + self._pattern.sub(lambda match: self._mark(match.group()), middle)
            + self._mark(text[len(text) - tail :])
        )

    def restore(self, text: str) -> str:
        """The text with the client's own characters back in place of the marks."""
        return self._mark_pattern.sub(lambda match: self._hidden[int(match.group(1))], text)

    def _mark(self, text: str) -> str:
        if not text:
            return ""
        self._hidden.append(text)
        return f"\U000f0000{self._nonce}:{len(self._hidden) - 1}\U000f0001"

    def _head_length(self, text: str) -> int:
        """Length of the longest start of the text that ends a special token begun before it."""
        return max(
            (
                n
                for literal in self._literals
                for n in range(1, len(literal))
                if text.startswith(literal[-n:])
            ),
            default=0,
        )

    def _tail_length(self, text: str) -> int:
        """Length of the longest end of the text that begins a special token."""
        return max(
            (
                n
                for literal in self._literals
                for n in range(1, len(literal))
                if text.endswith(literal[:n])
            ),
            default=0,
        )
