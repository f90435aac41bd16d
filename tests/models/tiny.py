"""A tiny random Qwen3-VL in torch, prompts with media, and how this project runs them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tpu_vl.mesh import replicated
from tpu_vl.models import qwen3_vl
from tpu_vl.models.family import Backend, EncodeInputs, TextInputs
from tpu_vl.vision.pack import FramePlan, PackedCall, fill_call
from tpu_vl.vision.positions import mrope_positions

# Without torch every module that imports this one is skipped.
torch: Any = pytest.importorskip("torch", reason="parity with transformers needs torch")

# Dims of one array are pairwise distinct, so that a missing transpose cannot hide.
TEXT = {
    "vocab_size": 199,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [3, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 5,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_heads": 4,
    "patch_size": 16,
    "out_hidden_size": 40,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [1, 3],
}
IDS: dict[str, Any] = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}
SIDE, MERGE, PATCH_WIDTH = 7, 2, 1536
CAPACITY, ROW_BLOCK, POOL_ROWS = 128, 32, 48
TOKENS, PAGE_SIZE, MAX_PAGES, NUM_SEQS = 128, 16, 8, 3
TOLERANCE = 1e-4


def hf_config(*, tied: bool = False) -> Qwen3VLConfig:
    """The tiny model's config."""
    return Qwen3VLConfig(
        text_config=TEXT | {"tie_word_embeddings": tied},
        vision_config=VISION,
        tie_word_embeddings=tied,
        **IDS,
    )


def hf_model(*, tied: bool = False, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """The tiny model with weights large enough that every part moves the logits."""
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(hf_config(tied=tied)).eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.3 if p.ndim == 1 else p.flatten(1).shape[1] ** -0.5
            p.copy_(torch.randn_like(p) * scale + float("norm" in name and p.ndim == 1))
    return model


@dataclass(frozen=True)
class Medium:
    """An image or a video of a prompt: its grid in patches and its patches."""

    kind: str
    grid_thw: tuple[int, int, int]
    patches_PW: np.ndarray


def medium(kind: str, t: int, h: int, w: int, seed: int) -> Medium:
    """A random medium; frames differ from each other."""
    rng = np.random.default_rng(seed)
    return Medium(kind, (t, h, w), rng.integers(0, 256, (t * h * w, PATCH_WIDTH), np.uint8))


@dataclass
class Prompt:
    """Token ids with expanded placeholders, the frames in prompt order, and the media."""

    ids: list[int] = field(default_factory=list)
    frames: list[tuple[int, int, int]] = field(default_factory=list)
    patches: list[np.ndarray] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)

    def text(self, count: int, seed: int = 0) -> "Prompt":
        """Appends random text tokens."""
        rng = np.random.default_rng([seed, len(self.ids)])
        self.ids += rng.integers(0, 180, count).tolist()
        return self

    def add(self, item: Medium) -> "Prompt":
        """Appends a medium; each frame of a video follows two tokens of timestamp text."""
        t, h, w = item.grid_thw
        pad = IDS["image_token_id"] if item.kind == "image" else IDS["video_token_id"]
        for frame in range(t):
            if item.kind == "video":
                self.text(2, seed=frame)
            self.ids.append(IDS["vision_start_token_id"])
            self.frames.append((len(self.ids), h, w))
            self.patches.append(item.patches_PW[frame * h * w : (frame + 1) * h * w])
            self.ids += [pad] * (h * w // MERGE**2)
            self.ids.append(IDS["vision_end_token_id"])
        self.media.append(item)
        return self

    @property
    def positions(self) -> np.ndarray:
        """M-RoPE positions [3, T]."""
        return mrope_positions(len(self.ids), self.frames, MERGE)[0]

    @property
    def num_rows(self) -> int:
        """Merged cells of all frames."""
        return sum(h * w // MERGE**2 for _, h, w in self.frames)

    def pool_rows(self, rows: np.ndarray) -> np.ndarray:
        """The pool row of each token, -1 for text."""
        out = np.full(len(self.ids), -1, np.int32)
        done = 0
        for start, h, w in self.frames:
            count = h * w // MERGE**2
            out[start : start + count] = rows[done : done + count]
            done += count
        return out


def pixels(item: Medium) -> Any:
    """The float pixel values that HF's processor would give."""
    return torch.from_numpy((item.patches_PW / np.float32(255) - np.float32(0.5)) / np.float32(0.5))


def hf_logits(model: Any, prompt: Prompt) -> np.ndarray:
    """Logits [T, V] of HF's model at every position."""
    ids = torch.tensor([prompt.ids])
    kwargs: dict[str, Any] = {}
    for kind, values, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [m for m in prompt.media if m.kind == kind]
        if items:
            kwargs[values] = torch.cat([pixels(m) for m in items])
            kwargs[grid] = torch.tensor([m.grid_thw for m in items])
    kinds = (ids == IDS["image_token_id"]).int() + 2 * (ids == IDS["video_token_id"]).int()
    model.model.rope_deltas = None
    with torch.no_grad():
        return model(input_ids=ids, mm_token_type_ids=kinds, **kwargs).logits[0].numpy()


def hf_text_logits(model: Any, ids: Sequence[int], head: Any) -> np.ndarray:
    """Logits of HF's text model, with plain positions, under an output matrix."""
    with torch.no_grad():
        hidden = model.model.language_model(torch.tensor([ids])).last_hidden_state[0]
        return (hidden @ head.T).numpy()


def hf_rows(model: Any, items: Sequence[Medium]) -> np.ndarray:
    """HF's tower output of media in order: [rows, 1 + levels, D]."""
    outs = []
    for item in items:
        with torch.no_grad():
            out = model.model.visual(pixels(item), grid_thw=torch.tensor([item.grid_thw]))
        outs.append(np.stack([out.pooler_output, *out.deepstack_features], axis=1))
    return np.concatenate(outs)


def packed(
    patches: Sequence[np.ndarray],
    grids: Sequence[tuple[int, int]],
    rows: np.ndarray,
    capacity: int = CAPACITY,
    layers: tuple[int, int] = (0, 5),
) -> EncodeInputs:
    """One tower call of these frames."""
    plans = tuple(FramePlan(key=i, grid_h=h, grid_w=w) for i, (h, w) in enumerate(grids))
    counts = [h * w // MERGE**2 for h, w in grids]
    split = np.split(rows.astype(np.int32), np.cumsum(counts)[:-1])
    call = PackedCall(capacity=capacity, frames=plans, bins=(0,) * len(plans), num_bins=1)
    arrays: dict[str, Any] = fill_call(
        call, patches, split, side=SIDE, merge_size=MERGE, layers=layers
    )
    return EncodeInputs(**arrays)


class Runner:
    """The project's programs for the tiny model, compiled once per shape.

    Args:
        params, cfg: the model.
        mesh: where the params are.
        paged_attention: its implementation; "dense" compiles faster.
    """

    def __init__(self, params: Any, cfg: Any, mesh: Mesh, paged_attention: str = "blocked") -> None:
        self.params = params
        self.cfg = cfg
        self.backend = Backend(mesh, "dense", paged_attention, ROW_BLOCK)
        static = ("cfg", "backend")
        self._encode = jax.jit(qwen3_vl.encode_step, static_argnames=static)
        self._text = jax.jit(qwen3_vl.text_step, static_argnames=static)
        self._logits = jax.jit(qwen3_vl.logits, static_argnames=static)

    def pool(self) -> jax.Array:
        """An empty media pool."""
        return jnp.zeros((POOL_ROWS + 1, 3, self.cfg.text.width), jnp.float32)

    def encode(
        self, inputs: EncodeInputs, pool: Any = None, hidden: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """One slice of a tower call: the pool and the hidden rows."""
        if hidden is None:
            hidden = jnp.zeros((inputs.patches_PW.shape[0], self.cfg.vision.width), jnp.float32)
        pool, hidden = self._placed((self.pool() if pool is None else pool, hidden))
        return self._encode(
            self.params.vision, pool, hidden, inputs, cfg=self.cfg, backend=self.backend
        )

    def prompt_pool(self, prompt: Prompt) -> tuple[Any, np.ndarray]:
        """The pool with a prompt's rows in scattered places, and the row of each token."""
        if not prompt.frames:
            return self.pool(), np.full(len(prompt.ids), -1, np.int32)
        rows = np.random.default_rng(5).permutation(POOL_ROWS)[: prompt.num_rows]
        grids = [(h, w) for _, h, w in prompt.frames]
        pool, _ = self.encode(packed(prompt.patches, grids, rows))
        return pool, prompt.pool_rows(rows)

    def caches(self) -> tuple[jax.Array, ...]:
        """Empty KV pages of each layer."""
        text = self.cfg.text
        shape = (NUM_SEQS * MAX_PAGES, PAGE_SIZE, 2 * text.num_kv_heads, text.head_dim)
        return tuple(jnp.zeros(shape, jnp.float32) for _ in range(text.num_layers))

    def step(
        self,
        caches: tuple[jax.Array, ...],
        pool: Any,
        batch: Sequence[tuple[Sequence[int], np.ndarray, Any, int]],
    ) -> tuple[np.ndarray, tuple[jax.Array, ...]]:
        """One ragged step; every new token's logits, sequence after sequence.

        Args:
            caches: of the step before.
            pool: media pool, or None: text only.
            batch: per sequence, new (ids, positions, pool rows, tokens cached before).
        """
        lens = [len(ids) for ids, *_ in batch]
        total = sum(lens)
        num_axes = batch[0][1].shape[0]
        ids_T: Any = np.zeros(TOKENS, np.int32)
        positions_XT: Any = np.zeros((num_axes, TOKENS), np.int32)
        ids_T[:total] = np.concatenate([np.asarray(ids) for ids, *_ in batch])
        positions_XT[:, :total] = np.concatenate([p for _, p, *_ in batch], axis=1)
        pool_row_T: Any = None
        if pool is not None:
            pool_row_T = np.full(TOKENS, -1, np.int32)
            pool_row_T[:total] = np.concatenate([r for _, _, r, _ in batch])
        q_starts_B: Any = np.full(NUM_SEQS + 1, total, np.int32)
        q_starts_B[: len(lens) + 1] = np.cumsum([0, *lens])
        kv_lens_B: Any = np.zeros(NUM_SEQS, np.int32)
        kv_lens_B[: len(lens)] = [n + b[3] for n, b in zip(lens, batch, strict=True)]
        # Pages in no order, so that nothing relies on neighbours.
        order = np.random.default_rng(3).permutation(NUM_SEQS * MAX_PAGES).astype(np.int32)
        pages: Any = order.reshape(NUM_SEQS, MAX_PAGES)
        rows: Any = np.arange(TOKENS, dtype=np.int32)
        inputs = TextInputs(
            ids_T=ids_T,
            positions_XT=positions_XT,
            pool_row_T=pool_row_T,
            page_table_BL=pages,
            q_starts_B=q_starts_B,
            kv_lens_B=kv_lens_B,
            row_tokens_R=rows,
        )
        caches, pool = self._placed((caches, pool))
        hidden, caches = self._text(
            self.params.text, caches, pool, inputs, cfg=self.cfg, backend=self.backend
        )
        out = self._logits(qwen3_vl.head(self.params), hidden, cfg=self.cfg, backend=self.backend)
        return np.asarray(out)[:total], caches

    def _placed(self, arrays: Any) -> Any:
        """The arrays with one sharding, however they were made: another would compile again."""
        return jax.device_put(arrays, replicated(self.backend.mesh))

    def logits(self, prompt: Prompt) -> np.ndarray:
        """Logits [T, V] of a prompt in one step."""
        pool, rows = self.prompt_pool(prompt)
        return self.step(self.caches(), pool, [(prompt.ids, prompt.positions, rows, 0)])[0]
