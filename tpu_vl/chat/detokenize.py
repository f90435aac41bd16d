"""Token ids to text as they arrive: whole characters only, stop strings held back."""

import codecs
from collections import deque
from dataclasses import dataclass

from tpu_vl.chat.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What one token adds to the answer.

    Args:
        text: may be sent now.
        num_released: tokens whose text is now sent in full, since the last delta.
        stop: the stop string that was met; nothing follows it.
    """

    text: str = ""
    num_released: int = 0
    stop: str | None = None


class Detokenizer:
    """The text of one answer, token by token, in time linear in its length.

    A character is given out when all its bytes are there, and no part of a possible stop string
    before it is known not to be one. The pieces joined equal the text of all ids at once.

    Args:
        tokenizer: the checkpoint's.
        stop: strings that end the answer; none of them empty.
        include_stop_str: the stop string met stays in the text.
        skip_special_tokens: special tokens add no text.
        min_tokens: text of the first so many tokens is not searched for stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop_str = include_stop_str
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._num_tokens = 0
        self._num_chars = 0
        self._ends: deque[int] = deque()

    def push(self, token_id: int) -> TextDelta:
        """Adds one token."""
        skip = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        data = b"" if skip else self._tokenizer.token_bytes(token_id)
        text = self._decoder.decode(data)
        self._num_tokens += 1
        # A token that ends inside a character is sent in full with that character.
        inside = bool(self._decoder.getstate()[0])
        self._ends.append(self._num_chars + len(text) + inside)
        return self._release(text)

    def finish(self) -> TextDelta:
        """The rest of the text when the answer ends otherwise than by a stop string."""
        delta = self._release(self._decoder.decode(b"", final=True))
        if delta.stop is not None:
            return delta
        rest = TextDelta(
            text=delta.text + self._held, num_released=delta.num_released + len(self._ends)
        )
        self._held = ""
        self._ends.clear()
        return rest

    def _release(self, new_text: str) -> TextDelta:
        self._num_chars += len(new_text)
        text = self._held + new_text
        if self._num_tokens <= self._min_tokens:
            return self._give(text, len(text))
        found = [(text.index(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            start, _, stop = min(found)
            given = self._give(text, start + len(stop) if self._include_stop_str else start)
            self._held = ""
            return TextDelta(text=given.text, num_released=given.num_released, stop=stop)
        return self._give(text, len(text) - max((_overlap(text, s) for s in self._stop), default=0))

    def _give(self, text: str, end: int) -> TextDelta:
        """Sends the text up to `end`, holds the rest, and counts the tokens that are now out."""
        self._held = text[end:]
        sent = self._num_chars - len(self._held)
        released = 0
        while self._ends and self._ends[0] <= sent:
            self._ends.popleft()
            released += 1
        return TextDelta(text=text[:end], num_released=released)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
