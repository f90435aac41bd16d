"""A tiny Qwen3-VL config whose arrays have pairwise distinct dims; needs no torch."""

from typing import Any

from tpu_vl.models import qwen3_vl


def small_dict(*, tied: bool = False) -> dict[str, Any]:
    """The tiny model's config.json."""
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": tied,
        "image_token_id": 190,
        "video_token_id": 191,
        "vision_start_token_id": 192,
        "vision_end_token_id": 193,
        "text_config": {
            "vocab_size": 198,
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 14,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "rope_scaling": {"mrope_section": [3, 2, 2], "rope_type": "default"},
        },
        "vision_config": {
            "depth": 5,
            "hidden_size": 48,
            "intermediate_size": 44,
            "num_heads": 4,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 40,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [1, 3],
        },
    }


def small_config(*, tied: bool = False, with_vision: bool = True) -> qwen3_vl.Qwen3VLConfig:
    """The tiny model's config."""
    return qwen3_vl.parse_config(small_dict(tied=tied), with_vision=with_vision)
