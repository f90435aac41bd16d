"""The bundled folder: its size, its types, its tokenizer; nothing in it is stale."""

import json

import av
import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from tokenizers import Tokenizer

from tpu_vl.demo import CHECKPOINT, MEDIA, NOTICE, bundle, configs, samples, tokenizer, words

LIMIT_BYTES = 8_000_000


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_folder_is_small():
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= LIMIT_BYTES


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


def test_bundled_media_are_the_generators():
    answers = json.loads((MEDIA / "answers.json").read_text())
    image = samples.image("heldout", bundle.IMAGE_INDEX)
    video = samples.video("heldout", bundle.VIDEO_INDEX)
    assert [a["answer"] for a in answers] == [image.answer("both"), video.answer("direction")]
    with Image.open(MEDIA / answers[0]["file"]) as picture:
        assert picture.tobytes() == image.frames[0].tobytes()
    with av.open(str(MEDIA / answers[1]["file"]), "r") as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(frames) == len(video.frames)
    for frame, original in zip(frames, video.frames, strict=True):
        assert np.abs(frame.astype(int) - np.asarray(original, dtype=int)).mean() < 8


def test_notice_says_what_it_knows_and_how_to_serve_a_real_model():
    for word in (*words.SHAPES, *words.COLOURS, "tpu-vl serve --model"):
        assert word in NOTICE
