"""The bundled checkpoint's JSON files: its architecture and how its media are prepared."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from tpu_vl.config import ProcessorConfig

# One merged cell is 32 x 32 pixels: a picture becomes 9 to 16 of them, a video about as many.
IMAGE_PIXELS = {"shortest_edge": 96 * 96, "longest_edge": 128 * 128}
VIDEO_PIXELS = {"shortest_edge": 128 * 128, "longest_edge": 2 * 128 * 128}
MAX_FRAMES = 32
MAX_POSITIONS = 4096


def model_config(tokenizer: Tokenizer) -> dict[str, object]:
    """config.json: Qwen3-VL's architecture with two DeepStack levels and a tied head."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "bfloat16",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
                "rope_type": "default",
            },
            "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "tie_word_embeddings": True,
            "use_cache": True,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 4,
            "hidden_size": 160,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 512,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 192,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
            "initializer_range": 0.02,
        },
    }


def processor_config() -> ProcessorConfig:
    """What a server reads from the processors' files, for training on the same pixels."""
    return ProcessorConfig(
        image_min_pixels=IMAGE_PIXELS["shortest_edge"],
        image_max_pixels=IMAGE_PIXELS["longest_edge"],
        video_min_pixels=VIDEO_PIXELS["shortest_edge"],
        video_max_pixels=VIDEO_PIXELS["longest_edge"],
        video_min_frames=MAX_FRAMES,
        video_max_frames=MAX_FRAMES,
    )


def _processor(kind: str, size: dict[str, int]) -> dict[str, object]:
    return {
        **({"image_processor_type": "Qwen2VLImageProcessor"} if kind == "image" else {}),
        **({"video_processor_type": "Qwen3VLVideoProcessor"} if kind == "video" else {}),
        "processor_class": "Qwen3VLProcessor",
        "size": size,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes config.json, generation_config.json and the processors' files into `folder`."""
    video = {
        **_processor("video", VIDEO_PIXELS),
        # As many frames as there are, up to the longest clip that was trained on.
        "fps": 2,
        "min_frames": MAX_FRAMES,
        "max_frames": MAX_FRAMES,
        "cap_pixels_per_frame": False,
    }
    files = {
        "config.json": model_config(tokenizer),
        "generation_config.json": {
            "do_sample": False,
            "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
            "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
            "eos_token_id": [
                tokenizer.token_to_id("<|im_end|>"),
                tokenizer.token_to_id("<|endoftext|>"),
            ],
        },
        "preprocessor_config.json": _processor("image", IMAGE_PIXELS),
        "video_preprocessor_config.json": video,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
