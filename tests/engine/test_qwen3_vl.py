"""The engine over a tiny random Qwen3-VL: batches, chunks and preemption keep its answers."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.toy import FAST_COMPILE, assert_nothing_held, run, tokens
from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout
from tpu_vl.engine.engine import Engine
from tpu_vl.engine.messages import AddRequest, Media, Output, Sampling
from tpu_vl.engine.runner import Runner
from tpu_vl.mesh import make_mesh
from tpu_vl.models.qwen3_vl import FAMILY
from tpu_vl.precompile.programs import ZEROS, make_backend, programs
from tpu_vl.vision.positions import mrope_positions
from tpu_vl.weights.random import random_params

IMAGE, VIDEO, START, END, PATCH_WIDTH = 190, 191, 192, 193, 1536
CFG = FAMILY.parse_config(
    {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "text_config": {
            "vocab_size": 200,
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 14,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [3, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 44,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "out_hidden_size": 40,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    with_vision=True,
    preprocessor=None,
)
GEOMETRY = FAMILY.geometry(CFG)
CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=192,
    max_num_seqs=4,
    max_num_batched_tokens=96,
    max_num_queued_reqs=16,
    page_size=8,
    num_pages=24,
    token_capacities=(7, 32, 33, 96),
    patch_capacities=(64,),
    pool_rows=16,
    vision_step_patch_layers=100,
    row_block=16,
    modalities=("image", "video"),
)


@cache
def runner_parts() -> tuple[dict[str, Any], Any]:
    mesh = make_mesh(1)
    table = {}
    for p in programs(FAMILY, CFG, CONFIG, make_backend(mesh, CONFIG)):
        placed = jax.tree.map(lambda a: a.sharding, p.outputs)
        jitted = jax.jit(p.function, donate_argnums=p.donate, out_shardings=placed)
        table[p.name] = jitted.lower(*p.arguments).compile(FAST_COMPILE)
    return table, random_params(FAMILY, CFG, mesh, "float32", seed=0)


def make_engine(chunk: int = 96) -> Engine:
    """An engine whose steps hold `chunk` tokens."""
    table, params = runner_parts()
    capacities = tuple(t for t in CONFIG.token_capacities if t <= chunk)
    config = replace(CONFIG, max_num_batched_tokens=chunk, token_capacities=capacities)
    runner = Runner(table, params, FAMILY.head(params), table[ZEROS]())
    return Engine(runner, config, geometry=GEOMETRY, vocab_size=FAMILY.vocab_size(CFG))


def request(request_id: str, parts: list[Any], max_tokens: int = 6) -> AddRequest:
    """Text as a token count, media as (kind, seed, t, h, w)."""
    rng, ids, frames, media = np.random.default_rng(7), [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, 180, part).tolist()
            continue
        kind, seed, t, h, w = part
        starts = []
        for _ in range(t):
            ids.append(START)
            starts.append(len(ids))
            frames.append((len(ids), h, w))
            ids += [IMAGE if kind == "image" else VIDEO] * (h * w // 4) + [END]
        patches = np.random.default_rng(seed).integers(0, 256, (t * h * w, PATCH_WIDTH), np.uint8)
        media.append(
            Media(
                kind=kind,
                digest=bytes([seed]) * 32,
                grid_thw=(t, h, w),
                patches=patches.tobytes(),
                starts=tuple(starts),
            )
        )
    positions, delta = mrope_positions(len(ids), frames, 2)
    return AddRequest(
        request_id=request_id,
        token_ids=np.asarray(ids, np.int32).tobytes(),
        positions=positions.tobytes(),
        position_delta=delta,
        media=tuple(media),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, num_logprobs=3),
    )


def logprobs(outputs: list[Output]) -> np.ndarray:
    return np.asarray([[v for _, v in e.top] for o in outputs for e in o.logprobs])


def alone(message: AddRequest) -> list[Output]:
    return run(make_engine(), [message])[message.request_id]


A, B = ("image", 1, 1, 4, 6), ("image", 2, 1, 8, 8)
VIDEO_PART = ("video", 3, 3, 4, 4)


def test_sixteen_mixed_requests_answer_as_each_alone():
    kinds = [[5], [3, A], [A, 4, B], [VIDEO_PART, 6], [2, B, VIDEO_PART], [A, A, 3, A], [40], [B]]
    messages = [request(f"r{i}", kinds[i % 8] + [i // 8 + 1], 4 + i % 5) for i in range(16)]
    engine = make_engine()
    outputs = run(engine, messages)
    assert_nothing_held(engine)
    for message in messages:
        expected = alone(message)
        assert tokens(outputs[message.request_id]) == tokens(expected)
        np.testing.assert_allclose(
            logprobs(outputs[message.request_id]), logprobs(expected), atol=1e-4
        )


@pytest.mark.parametrize("chunk", [7, 32, 33])
def test_chunks_through_an_image_keep_the_logits(chunk):
    message = request("r", [20, B, 9, A, B, 3])
    expected = alone(message)
    outputs = run(make_engine(chunk), [message])["r"]
    assert tokens(outputs) == tokens(expected)
    np.testing.assert_allclose(logprobs(outputs), logprobs(expected), atol=1e-4)


def test_a_preempted_request_sees_its_images_again():
    messages = [request(f"r{i}", [1, ("image", 10 + i, 1, 8, 8), 2], 60) for i in range(4)]
    engine = make_engine()
    outputs = run(engine, messages)
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.frames_encoded_total > len(messages)
    for message in messages:
        assert tokens(outputs[message.request_id]) == tokens(alone(message))


def test_programs_know_where_their_arguments_go():
    table, _ = runner_parts()
    assert set(table) >= {layout.text_name(96), layout.sample_name(4), layout.encode_name(64)}
    for name, program in table.items():
        num_arguments = {"text": 3, "sample": 4, "encode": 5}.get(name.partition("/")[0], 0)
        assert len(program.input_shardings[0]) == num_arguments
