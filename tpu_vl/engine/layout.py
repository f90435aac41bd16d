"""Every shape and name of the engine's programs, and the packed int32 arrays that feed them.

All metadata of a call travels as one int32 array. A `Layout` names its fields: the host writes
through numpy views of the array (`new`), the program cuts the same fields out of it (`unpack`).
Untouched fields hold the padding that their documentation states.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_vl.config import EngineConfig
from tpu_vl.models.family import VisionGeometry
from tpu_vl.tree import pytree

BIAS_CAPACITY = 300
"""logit_bias entries of one request, and of all requests that are admitted in one step."""

STOP_CAPACITY = 16
"""Stop token ids of one request that `min_tokens` holds back."""

MAX_LOGPROBS = 20
"""Alternatives reported per answer token."""

UNCOUNTED, PROMPT_TOKEN, ANSWER_TOKEN = 0, 1, 2
"""How a token of a text batch enters the counts that penalties read."""

PROMPT_BIT = 1 << 15
"""Bit of a count that says: the token is in the prompt; the lower bits count answer tokens."""

NO_TOKEN = np.iinfo(np.int32).max
"""A token id that no vocabulary holds: scatters drop it."""

DType = Literal["int32", "uint32", "float32"]


def text_name(num_tokens: int) -> str:
    """The table key of the text program of that token capacity."""
    return f"text/{num_tokens}"


def sample_name(num_rows: int) -> str:
    """The table key of the sampling program of that row capacity."""
    return f"sample/{num_rows}"


def encode_name(num_patches: int) -> str:
    """The table key of the tower program of that patch capacity."""
    return f"encode/{num_patches}"


def sample_capacities(engine_config: EngineConfig) -> tuple[int, ...]:
    """Row capacities of the sampling programs, ascending: those that text programs give."""
    return tuple(sorted({engine_config.rows_of(t) for t in engine_config.token_capacities}))


@dataclass(frozen=True)
class Field:
    """A named run of a packed array: `fill` is its padding, `offset` counts int32 words."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    fill: float
    offset: int

    @property
    def num_words(self) -> int:
        """Words of the packed array that it covers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The fields of one packed int32 array of `size` words."""

    fields: tuple[Field, ...]
    size: int

    @classmethod
    def make(cls, spec: Mapping[str, tuple[DType, tuple[int, ...], float]]) -> "Layout":
        """The layout of {name: (dtype, shape, fill)}, in that order."""
        fields: list[Field] = []
        offset = 0
        for name, (dtype, shape, fill) in spec.items():
            fields.append(Field(name, dtype, shape, fill, offset))
            offset += fields[-1].num_words
        return cls(tuple(fields), offset)

    def new(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A packed array full of padding, and writable views of its fields by name."""
        packed = np.empty(self.size, np.int32)
        views: dict[str, np.ndarray] = {}
        for f in self.fields:
            view = packed[f.offset : f.offset + f.num_words].view(f.dtype).reshape(f.shape)
            view.fill(f.fill)
            views[f.name] = view
        return packed, views

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The fields of a packed array, inside a program."""
        out: dict[str, jax.Array] = {}
        for f in self.fields:
            words = jax.lax.slice(packed, (f.offset,), (f.offset + f.num_words,))
            if f.dtype != "int32":
                words = jax.lax.bitcast_convert_type(words, jnp.dtype(f.dtype))
            out[f.name] = words.reshape(f.shape)
        return out


@pytree
class TextBatch:
    """What a text program is told: T tokens of B sequences, with changes of the slots' state.

    Args:
        ids_T: int32 token ids; -1: the `last_token` of the token's slot.
        slot_T: int32 slot of each token; the number of slots for padding.
        positions_XT: int32, X = 3 (time, row, column) or 1 in a text-only process.
        pool_row_T: int32 pool row of each token, -1 for text; None in a text-only process.
        count_T: int32 UNCOUNTED, PROMPT_TOKEN or ANSWER_TOKEN.
        q_starts_B: int32 [B + 1] cumulative new tokens; sequences past the last repeat the total.
        kv_lens_B: int32 tokens in the cache including the new ones; 0 for padding.
        slot_B: int32 slot of each sequence; the number of slots for padding.
        row_tokens_R: int32 batch index of the token behind each wanted hidden row; padding 0.
        delta_slot_A, delta_index_A, delta_page_A: int32 new page-table entries; the slot is the
            number of slots for padding.
        reset_slot_B: int32 slots that a new sequence takes over, first; then the number of slots.
        bias_slot_Z, bias_index_Z, bias_id_Z: int32 logit_bias entries of new sequences: slot (the
            number of slots for padding), place in the slot, token id.
        bias_value_Z: float32 their values.
    """

    ids_T: jax.Array
    slot_T: jax.Array
    positions_XT: jax.Array
    pool_row_T: jax.Array | None
    count_T: jax.Array
    q_starts_B: jax.Array
    kv_lens_B: jax.Array
    slot_B: jax.Array
    row_tokens_R: jax.Array
    delta_slot_A: jax.Array
    delta_index_A: jax.Array
    delta_page_A: jax.Array
    reset_slot_B: jax.Array
    bias_slot_Z: jax.Array
    bias_index_Z: jax.Array
    bias_id_Z: jax.Array
    bias_value_Z: jax.Array


def page_delta_capacity(engine_config: EngineConfig, num_tokens: int) -> int:
    """Pages that T new tokens of B sequences can open: ceil(T / page_size) + B."""
    return -(-num_tokens // engine_config.page_size) + engine_config.rows_of(num_tokens)


@cache
def text_layout(engine_config: EngineConfig, num_tokens: int) -> Layout:
    """The packed `TextBatch` of the text program of that token capacity."""
    t, b = num_tokens, engine_config.rows_of(num_tokens)
    a, none = page_delta_capacity(engine_config, t), engine_config.max_num_seqs
    has_media = bool(engine_config.modalities)
    pool_row: dict[str, tuple[DType, tuple[int, ...], float]] = {}
    if has_media:
        pool_row["pool_row_T"] = ("int32", (t,), -1)
    return Layout.make(
        {
            "ids_T": ("int32", (t,), 0),
            "slot_T": ("int32", (t,), none),
            "positions_XT": ("int32", (3 if has_media else 1, t), 0),
            **pool_row,
            "count_T": ("int32", (t,), UNCOUNTED),
            "q_starts_B": ("int32", (b + 1,), 0),
            "kv_lens_B": ("int32", (b,), 0),
            "slot_B": ("int32", (b,), none),
            "row_tokens_R": ("int32", (b,), 0),
            "delta_slot_A": ("int32", (a,), none),
            "delta_index_A": ("int32", (a,), 0),
            "delta_page_A": ("int32", (a,), 0),
            "reset_slot_B": ("int32", (b,), none),
            "bias_slot_Z": ("int32", (BIAS_CAPACITY,), none),
            "bias_index_Z": ("int32", (BIAS_CAPACITY,), 0),
            "bias_id_Z": ("int32", (BIAS_CAPACITY,), 0),
            "bias_value_Z": ("float32", (BIAS_CAPACITY,), 0.0),
        }
    )


@pytree
class SampleRows:
    """What a sampling program is told of each row.

    Args:
        slot_R: int32 slot; the number of slots for padding, whose token goes nowhere.
        seed_R: uint32 seed of the request.
        step_R: int32 answer tokens before this one.
        temperature_R: float32 >= 0; 0 is greedy.
        top_k_R: int32; 0 keeps all.
        top_p_R: float32 in (0, 1].
        min_p_R: float32 in [0, 1].
        repetition_R, presence_R, frequency_R: float32 penalties; 1, 0 and 0 are off.
        counted_R: int32 1 where the slot counts its tokens, because a penalty is on.
        biased_R: int32 1 where the slot has a logit_bias.
        num_logprobs_R: int32 alternatives wanted, 0 to MAX_LOGPROBS; -1: no logprobs.
        stop_ids_RS: int32 ids that must not be sampled yet; NO_TOKEN pads.
    """

    slot_R: jax.Array
    seed_R: jax.Array
    step_R: jax.Array
    temperature_R: jax.Array
    top_k_R: jax.Array
    top_p_R: jax.Array
    min_p_R: jax.Array
    repetition_R: jax.Array
    presence_R: jax.Array
    frequency_R: jax.Array
    counted_R: jax.Array
    biased_R: jax.Array
    num_logprobs_R: jax.Array
    stop_ids_RS: jax.Array


@cache
def sample_layout(engine_config: EngineConfig, num_rows: int) -> Layout:
    """The packed `SampleRows` of the sampling program of that row capacity."""
    r = (num_rows,)
    return Layout.make(
        {
            "slot_R": ("int32", r, engine_config.max_num_seqs),
            "seed_R": ("uint32", r, 0),
            "step_R": ("int32", r, 0),
            "temperature_R": ("float32", r, 0.0),
            "top_k_R": ("int32", r, 0),
            "top_p_R": ("float32", r, 1.0),
            "min_p_R": ("float32", r, 0.0),
            "repetition_R": ("float32", r, 1.0),
            "presence_R": ("float32", r, 0.0),
            "frequency_R": ("float32", r, 0.0),
            "counted_R": ("int32", r, 0),
            "biased_R": ("int32", r, 0),
            "num_logprobs_R": ("int32", r, -1),
            "stop_ids_RS": ("int32", (num_rows, STOP_CAPACITY), NO_TOKEN),
        }
    )


@cache
def encode_layout(geometry: VisionGeometry, num_patches: int) -> Layout:
    """The packed fields of `family.EncodeInputs` beside the patches and the layer range."""
    p = num_patches
    return Layout.make(
        {
            "coords_2P": ("int32", (2, p), 0),
            "interp_index_4P": ("int32", (4, p), 0),
            "interp_weight_4P": ("float32", (4, p), 0.0),
            "bounds_2P": ("int32", (2, p), 0),
            "rows_M": ("int32", (p // geometry.merge_size**2,), -1),
            "num_patches_X": ("int32", (geometry.num_bins,), 0),
        }
    )
