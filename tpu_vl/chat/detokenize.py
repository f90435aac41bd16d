"""Token ids to text as they arrive: whole characters only, stop strings held back."""

import codecs
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
        self._num_held_tokens = 0
        self._num_tokens = 0

    def push(self, token_id: int) -> TextDelta:
        """Adds one token."""
        skip = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        data = b"" if skip else self._tokenizer.token_bytes(token_id)
        self._num_tokens += 1
        self._num_held_tokens += 1
        return self._release(self._decoder.decode(data))

    def finish(self) -> TextDelta:
        """The rest of the text when the answer ends otherwise than by a stop string."""
        delta = self._release(self._decoder.decode(b"", final=True))
        if delta.stop is not None:
            return delta
        text, self._held = delta.text + self._held, ""
        released, self._num_held_tokens = delta.num_released + self._num_held_tokens, 0
        return TextDelta(text=text, num_released=released)

    def _release(self, new_text: str) -> TextDelta:
        if self._num_tokens <= self._min_tokens:
            return self._give(self._held + new_text, "")
        text = self._held + new_text
        found = [(text.index(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            start, _, stop = min(found)
            end = start + len(stop) if self._include_stop_str else start
            self._held = ""
            return TextDelta(
                text=text[:end],
                num_released=self._num_held_tokens if self._include_stop_str else 0,
                stop=stop,
            )
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        return self._give(text[: len(text) - keep], text[len(text) - keep :])

    def _give(self, text: str, held: str) -> TextDelta:
        self._held = held
        pending = bool(held) or bool(self._decoder.getstate()[0])
        # Tokens are released with the last of their text; until then their log-probabilities wait.
        released = 0 if pending else self._num_held_tokens
        self._num_held_tokens -= released
        return TextDelta(text=text, num_released=released)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
