"""A tiny Qwen3-VL with random weights on any number of virtual devices, served by the real engine.

24 heads divide by every size tried here; 4 K/V heads, 50 MLP columns and 199 ids by few of them,
so copies and padding are at work. The weights of one seed are the same on any mesh.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tests.engine.toy import FAST_COMPILE, run
from tpu_vl.config import EngineConfig
from tpu_vl.engine.engine import Engine
from tpu_vl.engine.messages import AddRequest, Media, Output, Sampling
from tpu_vl.engine.runner import Runner
from tpu_vl.mesh import make_mesh
from tpu_vl.models.family import Backend
from tpu_vl.models.qwen3_vl import FAMILY
from tpu_vl.precompile.programs import ZEROS, Program, make_backend, programs
from tpu_vl.vision.positions import mrope_positions
from tpu_vl.weights.random import random_params

SIZES = (1, 2, 3, 4, 6, 8)
IMAGE, VIDEO, START, END, VOCAB = 190, 191, 192, 193, 199
PATCH, MERGE, PATCH_WIDTH, POOL_ROWS, ROW_BLOCK, FRAME = 4, 2, 96, 64, 16, 64


def config_dict(*, tower_heads: int = 24, num_heads: int = 24, num_kv_heads: int = 4) -> Any:
    """The model's config.json."""
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "text_config": {
            "vocab_size": VOCAB,
            "hidden_size": 40,
            "intermediate_size": 50,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"},
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 4 * tower_heads,
            "intermediate_size": 44,
            "num_heads": tower_heads,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 40,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 1],
        },
    }


def model_config(num_shards: int, mode: str, **sizes: int) -> Any:
    """The model's config on so many devices."""
    return FAMILY.shard(FAMILY.parse_config(config_dict(**sizes)), num_shards, mode)


def engine_config(num_shards: int, mode: str) -> EngineConfig:
    """Sizes whose smallest and largest tower calls both hold the largest frame of a test."""
    bins = num_shards if mode == "data" else 1
    unit = math.lcm(num_shards // bins * MERGE**2, ROW_BLOCK)
    return EngineConfig(
        dtype="float32",
        tensor_parallel_size=num_shards,
        max_model_len=192,
        max_num_seqs=4,
        max_num_batched_tokens=96,
        page_size=8,
        num_pages=48,
        token_capacities=(96,),
        patch_capacities=(-(-FRAME // unit) * unit * bins,),
        pool_rows=POOL_ROWS,
        vision_step_patch_layers=100,
        row_block=ROW_BLOCK,
        row_steps=(2,),
        modalities=("image", "video"),
    )


def compiled(program: Program) -> Any:
    """The executable of a program, quickly made."""
    placed = jax.tree.map(lambda a: a.sharding, program.outputs)
    jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=placed)
    return jitted.lower(*program.arguments).compile(FAST_COMPILE)


def backend_of(mesh: Mesh, sizes: EngineConfig) -> Backend:
    """The backend with the implementations that compile fastest."""
    return replace(make_backend(mesh, sizes), vision_attention="dense", paged_attention="dense")


@dataclass(frozen=True)
class Served:
    """A model on so many devices: config, sizes, programs and weights."""

    cfg: Any
    sizes: EngineConfig
    table: dict[str, Any]
    params: Any

    def answer(self, messages: list[AddRequest]) -> dict[str, list[Output]]:
        """What a fresh engine answers."""
        runner = Runner(self.table, self.params, FAMILY.head(self.params), self.table[ZEROS]())
        engine = Engine(runner, self.sizes, geometry=FAMILY.geometry(self.cfg), vocab_size=VOCAB)
        return run(engine, messages)


@cache
def served(num_shards: int, mode: str, tower_heads: int = 24, num_kv_heads: int = 4) -> Served:
    """The model on `num_shards` devices, the same weights on any."""
    cfg = model_config(num_shards, mode, tower_heads=tower_heads, num_kv_heads=num_kv_heads)
    sizes, mesh = engine_config(num_shards, mode), make_mesh(num_shards)
    listed = programs(FAMILY, cfg, sizes, backend_of(mesh, sizes))
    table = {p.name: compiled(p) for p in listed}
    return Served(cfg, sizes, table, random_params(FAMILY, cfg, mesh, "float32", seed=0))


def request(name: str, parts: list[Any], max_tokens: int = 3) -> AddRequest:
    """Text as a token count, media as (kind, seed, t, h, w); greedy, with 20 log-probabilities."""
    rng, ids, frames, media = np.random.default_rng(7), [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, 180, part).tolist()
            continue
        kind, seed, t, h, w = part
        starts = []
        for _ in range(t):
            starts.append(len(ids) + 1)
            frames.append((len(ids) + 1, h, w))
            pad = IMAGE if kind == "image" else VIDEO
            ids += [START, *[pad] * (h * w // MERGE**2), END]
        patches = np.random.default_rng(seed).integers(0, 256, (t * h * w, PATCH_WIDTH), np.uint8)
        medium = Media(
            kind=kind,
            digest=bytes([seed]) * 32,
            grid_thw=(t, h, w),
            patches=patches.tobytes(),
            starts=tuple(starts),
        )
        media.append(medium)
    positions, delta = mrope_positions(len(ids), frames, MERGE)
    return AddRequest(
        request_id=name,
        token_ids=np.asarray(ids, np.int32).tobytes(),
        positions=positions.tobytes(),
        position_delta=delta,
        media=tuple(media),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, num_logprobs=20),
    )
