"""The checkpoint's tokenizer: plain text to ids, special ids by name, ids to bytes."""

import functools
import json
from pathlib import Path

import tokenizers

from tpu_vl.errors import CheckpointError


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: which printable character stands for which byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    table = {chr(byte): byte for byte in shown}
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table


class Tokenizer:
    """A byte-level BPE of a checkpoint folder, immutable after loading and safe for all threads.

    Nothing changes the inner object after `__init__` (no truncation, padding or flag is ever set
    per call), so threads share it without a lock and the library never finds it already borrowed.

    Args:
        folder: holds tokenizer.json, or the files that transformers' AutoTokenizer converts.

    Attributes:
        special_ids: literal -> id of every special token.
        eos_ids: ids that end an answer, from generation_config.json, config.json or the tokenizer.
        vocab_size: number of ids.

    Raises:
        CheckpointError: no tokenizer, or one that is not byte-level; serve a Qwen checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._inner = _load(self._folder)
        # Text never yields special ids: they come from `special_ids`, by name, only.
        self._inner.encode_special_tokens = True
        self._check_byte_level()
        added = self._inner.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self.special_ids = {t.content: index for index, t in added.items() if t.special}
        self._special = frozenset(self.special_ids.values())
        self.vocab_size = self._inner.get_vocab_size(with_added_tokens=True)
        self.eos_ids = self._read_eos_ids()

    def encode(self, text: str) -> list[int]:
        """The ids of a text; literals of special tokens in it are ordinary characters."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def special_id(self, literal: str) -> int:
        """The id of a special token by its literal.

        Raises:
            CheckpointError: the tokenizer has no such special token.
        """
        if literal not in self.special_ids:
            raise CheckpointError(f"the tokenizer in {self._folder} has no special token {literal}")
        return self.special_ids[literal]

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a special token's."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" for ids outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._inner.id_to_token(token_id)
        return b"" if piece is None else _bytes_of(piece)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, invalid UTF-8 shown as U+FFFD."""
        kept = (i for i in ids if not (skip_special_tokens and i in self._special))
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def _check_byte_level(self) -> None:
        decoder = json.loads(self._inner.to_str()).get("decoder") or {}
        kinds = {decoder.get("type")} | {d.get("type") for d in decoder.get("decoders", ())}
        if "ByteLevel" not in kinds:
            raise CheckpointError(
                f"the tokenizer in {self._folder} decodes with {decoder.get('type')}, not "
                "ByteLevel; serve a checkpoint with a byte-level BPE such as Qwen's"
            )

    def _read_eos_ids(self) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            config = _read_json(self._folder / name)
            for section in (config, config.get("text_config") or {}):
                found = section.get("eos_token_id")
                if found is not None:
                    return tuple(found) if isinstance(found, list) else (int(found),)
        token = _read_json(self._folder / "tokenizer_config.json").get("eos_token")
        literal = token.get("content") if isinstance(token, dict) else token
        return (self.special_id(literal),) if literal else ()


@functools.lru_cache(maxsize=65536)
def _bytes_of(piece: str) -> bytes:
    table = _byte_of_char()
    return bytes(table[char] for char in piece)


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}


def _load(folder: Path) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds no tokenizer.json, and transformers finds no other tokenizer: {error}"
        ) from error
    return converted.backend_tokenizer
