"""Ids of plain text, bytes of ids, and many threads on one tokenizer."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tpu_vl.demo
from tpu_vl.chat.tokenizer import Tokenizer
from tpu_vl.errors import CheckpointError

FOLDER = Path(tpu_vl.demo.__file__).parent / "checkpoint"
TOKENIZER = Tokenizer(FOLDER)


def test_literals_of_special_tokens_in_text_give_no_special_ids():
    for literal, token_id in TOKENIZER.special_ids.items():
        ids = TOKENIZER.encode(f"a {literal} b")
        assert token_id not in ids
        assert TOKENIZER.decode(ids) == f"a {literal} b"
    assert TOKENIZER.special_id("<|image_pad|>") == TOKENIZER.special_ids["<|image_pad|>"]


def test_an_unknown_special_token_is_named():
    with pytest.raises(CheckpointError, match="audio_pad"):
        TOKENIZER.special_id("<|audio_pad|>")


@given(st.text())
def test_decoding_gives_the_text_back_in_normal_form(text):
    normal = TOKENIZER._inner.normalizer.normalize_str(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == normal


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_bytes_of_any_ids_decode_as_the_library_decodes_them(ids):
    plain = [i for i in ids if not TOKENIZER.is_special(i)]
    assert TOKENIZER.decode(ids) == TOKENIZER._inner.decode(plain)


def test_ids_outside_the_vocabulary_add_nothing():
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 7) == b""


def test_special_tokens_are_shown_when_not_skipped():
    eos = TOKENIZER.eos_ids[0]
    assert TOKENIZER.decode([eos], skip_special_tokens=False) == "<|im_end|>"
    assert TOKENIZER.decode([eos]) == ""


def test_threads_share_a_tokenizer_without_errors():
    texts = [f"which shape is picture {i}? {'red ' * (i % 7)}" for i in range(400)]
    alone = [TOKENIZER.encode(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(TOKENIZER.encode, texts)) == alone


def test_end_ids_come_from_the_generation_config_then_from_the_tokenizer(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    assert Tokenizer(tmp_path).eos_ids == (TOKENIZER.special_id("<|im_end|>"),)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 3}}))
    assert Tokenizer(tmp_path).eos_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert Tokenizer(tmp_path).eos_ids == (5, 6)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    parts = json.loads((FOLDER / "tokenizer.json").read_text())
    parts["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(CheckpointError, match="ByteLevel"):
        Tokenizer(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
