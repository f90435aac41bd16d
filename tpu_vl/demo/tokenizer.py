"""The bundled model's own byte-level BPE, in the files that transformers reads."""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tpu_vl.demo import words

VOCAB_SIZE = 576

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# The split of Qwen2Tokenizer (transformers 5.24), which rebuilds the pipeline when it loads.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_COMMON = (
    "system\nuser\nassistant\nPicture 1: Video 1: Hello, what can you do? Tell me about it. "
    "I know only shapes, colours and directions. The answer is one word. How many are there? "
    "Yes, no, please, thank you. Is this a photo of the house, the car or the dog?"
)


def corpus() -> list[str]:
    """The texts the merges are learnt from: phrasings, answers, timestamps and common words."""
    asked: list[str] = []
    for phrasing in itertools.chain.from_iterable(words.QUESTIONS.values()):
        for colour, shape in itertools.product(words.COLOURS, words.SHAPES):
            name = f"{colour} {shape}"
            slots = {"colour": colour, "shape": shape, "first": name, "second": name}
            asked.append(phrasing.format(**slots, thing=name))
    answers = [
        words.sentence(f"{words.named(colour, shape)} {relation} {words.named(colour, shape)}")
        for colour in words.COLOURS
        for shape in words.SHAPES
        for relation in words.RELATIONS
    ]
    answers += [words.sentence(f"{count} shapes") for count in words.COUNTS]
    answers += [words.sentence(f"the {kind} 7") for kind in ("digit", "number")]
    alone = [*words.SHAPES, *words.COLOURS, *words.DIRECTIONS, *words.RELATIONS, *words.COUNTS]
    alone += [*words.PLACES, "yes", "no"]
    stamps = [f"<{tenth / 10:.1f} seconds>" for tenth in range(60)]
    return [*asked, *words.SYSTEM_PROMPTS, *answers, *stamps, *alone * 20, _COMMON]


def build() -> Tokenizer:
    """Trains the tokenizer: 256 bytes, merges up to `VOCAB_SIZE`, special tokens last."""
    tokenizer = Tokenizer(BPE(unk_token=None, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (class Qwen2Tokenizer) into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
