"""The bundled folder: its size, its types, its tokenizer; nothing in it is stale."""

import json
import math

import av
import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from tokenizers import Tokenizer

from tpu_vl.demo import CHECKPOINT, MEDIA, NOTICE, bundle, configs, samples, tokenizer, words

LIMIT_BYTES = 12_500_000
LIMIT_WEIGHT_BYTES = 12_000_000
LIMIT_PARAMETERS = 6_000_000


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_folder_is_small():
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= LIMIT_BYTES
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= LIMIT_WEIGHT_BYTES
    with safe_open(CHECKPOINT / "model.safetensors", framework="np") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
    assert sum(math.prod(shape) for shape in shapes) <= LIMIT_PARAMETERS


def test_weights_are_bfloat16_and_the_head_is_tied():
    with safe_open(CHECKPOINT / "model.safetensors", framework="np") as file:
        dtypes = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert dtypes == {"BF16"}


def test_files_are_what_the_scripts_write(tmp_path):
    made = tokenizer.build()
    tokenizer.save(made, tmp_path)
    configs.save(made, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert "config.json" in names
    for name in names:
        assert (tmp_path / name).read_text() == (CHECKPOINT / name).read_text(), name


def test_architecture():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["model_type"] == "qwen3_vl"
    assert config["tie_word_embeddings"] is True
    assert len(config["vision_config"]["deepstack_visual_indexes"]) >= 2


@pytest.mark.parametrize(
    "text",
    [
        "What shape is this?",
        "<0.3 seconds>",
        "Grüße, 日本語, Привет, عربى",
        "😀👩‍👩‍👧 emoji",
        "  spaces \t tabs\r\n\n lines",
        "\x00\x07 controls",
        "x = [1, 2, 3]; print(f'{x!r}')",
    ],
)
def test_tokenizer_round_trip(bpe, text):
    assert bpe.decode(bpe.encode(text).ids) == text


def test_special_ids(bpe):
    config = json.loads((CHECKPOINT / "config.json").read_text())
    ids = {token: bpe.token_to_id(token) for token in tokenizer.SPECIAL_TOKENS}
    assert sorted(ids.values()) == list(range(bpe.get_vocab_size() - 8, bpe.get_vocab_size()))
    assert config["image_token_id"] == ids["<|image_pad|>"]
    assert config["video_token_id"] == ids["<|video_pad|>"]
    assert config["vision_start_token_id"] == ids["<|vision_start|>"]
    assert config["vision_end_token_id"] == ids["<|vision_end|>"]
    assert config["text_config"]["vocab_size"] == bpe.get_vocab_size()
    for token, number in ids.items():
        assert bpe.encode(f"a{token}b").ids[1] == number
    end = json.loads((CHECKPOINT / "generation_config.json").read_text())["eos_token_id"]
    assert end == [ids["<|im_end|>"], ids["<|endoftext|>"]]


def test_tokenizer_loads_in_transformers(bpe):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(CHECKPOINT))
    assert type(loaded).__name__.startswith("Qwen2Tokenizer")
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.pad_token == "<|endoftext|>"
    for text in (
        "What shape is this?",
        "<|im_start|>user\nnaïve<|im_end|>\n",
        "日本 <1.2 seconds>",
    ):
        assert loaded.encode(text) == bpe.encode(text).ids


def test_answers_are_single_tokens(bpe):
    alone = [*words.SHAPES, *words.COLOURS, *words.DIRECTIONS, *words.COUNTS, *words.PLACES]
    ids = [bpe.encode(word).ids for word in alone]
    assert all(len(found) == 1 for found in ids)
    assert len({found[0] for found in ids}) == len(alone)


def test_bundled_media_are_the_generators():
    answers = json.loads((MEDIA / "answers.json").read_text())
    expected = []
    for file, kind, index, tasks in bundle.BUNDLED:
        sample = samples.sample("heldout", kind, index)
        asks = [sample.ask(task) for task in tasks]
        expected += [{"file": file, "question": a.text(0), "answer": a.answer} for a in asks]
        if not sample.is_clip:
            with Image.open(MEDIA / file) as picture:
                assert picture.tobytes() == sample.media[0][0].tobytes()
            continue
        with av.open(str(MEDIA / file), "r") as opened:
            frames = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]
        assert len(frames) == len(sample.media[0])
        for frame, original in zip(frames, sample.media[0], strict=True):
            assert np.abs(frame.astype(int) - np.asarray(original, dtype=int)).mean() < 8
    assert answers == expected


def test_notice_says_what_it_knows_and_how_to_serve_a_real_model():
    for word in (*words.SHAPES, *words.COLOURS, "tpu-vl serve --model"):
        assert word in NOTICE
