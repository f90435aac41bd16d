"""The three pure functions that every program on the request path is compiled from."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout, sampling
from tpu_vl.engine.layout import (
    ANSWER_TOKEN,
    PROMPT_BIT,
    PROMPT_TOKEN,
    UNCOUNTED,
    SampleRows,
    TextBatch,
)
from tpu_vl.engine.sampling import SampleOutputs
from tpu_vl.engine.state import DeviceState
from tpu_vl.models.family import Backend, EncodeInputs, Family, TextInputs, VisionGeometry


def text_program(
    params_text: Any,
    state: DeviceState,
    batch: jax.Array,
    *,
    family: Family,
    cfg: Any,
    backend: Backend,
    engine_config: EngineConfig,
    num_tokens: int,
) -> tuple[jax.Array, DeviceState]:
    """Runs the language model over one ragged batch; donate `state`.

    Args:
        params_text: the params tree's `text`.
        state: the device state.
        batch: int32 [text_layout(engine_config, num_tokens).size], a packed `TextBatch`.
        family, cfg, backend, engine_config: static.
        num_tokens: T, one of the token capacities (static).

    Returns:
        hidden_RD after the final norm, R = engine_config.rows_of(T); and the state.
    """
    unpacked = layout.text_layout(engine_config, num_tokens).unpack(batch)
    if not engine_config.modalities:
        unpacked["pool_row_T"] = None  # pyright: ignore[reportArgumentType]
    b = TextBatch(**unpacked)
    last_T = jnp.take(state.last_token_B, b.slot_T, mode="clip")
    ids_T = jnp.where(b.ids_T < 0, last_T, b.ids_T)
    page_table_BL = state.page_table_BL.at[b.delta_slot_A, b.delta_index_A].set(
        b.delta_page_A, mode="drop"
    )
    inputs = TextInputs(
        ids_T=ids_T,
        positions_XT=b.positions_XT,
        pool_row_T=b.pool_row_T,
        page_table_BL=jnp.take(page_table_BL, b.slot_B, axis=0, mode="clip"),
        q_starts_B=b.q_starts_B,
        kv_lens_B=b.kv_lens_B,
        row_tokens_R=b.row_tokens_R,
    )
    hidden_RD, caches = family.text_step(
        params_text, state.caches_LSCH, state.pool_RJD, inputs, cfg=cfg, backend=backend
    )
    return hidden_RD, replace(
        state,
        caches_LSCH=caches,
        page_table_BL=page_table_BL,
        **_slots_after(state, b, ids_T),
    )


def _slots_after(state: DeviceState, b: TextBatch, ids_T: jax.Array) -> dict[str, jax.Array]:
    """Counts and biases of the slots, with those of new sequences cleared and set.

    Most steps have no new sequence and no penalty: loops of as many trips as there are, so that
    nothing is spent on the others (a scatter would visit every padding entry).
    """
    counts_BV = state.counts_BV
    num_resets = jnp.sum(b.reset_slot_B < counts_BV.shape[0], dtype=jnp.int32)

    def clear(i: jax.Array, counts_BV: jax.Array) -> jax.Array:
        slot = b.reset_slot_B[i]
        row_1V = jax.lax.dynamic_slice_in_dim(counts_BV, slot, 1)
        # Not a constant row: that would be made before the loop, in every step.
        none = (slot < 0).astype(counts_BV.dtype)
        return jax.lax.dynamic_update_slice_in_dim(counts_BV, row_1V * none, slot, 0)

    def bias(_: Any, biases: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        id_BZ, value_BZ = biases
        value_BZ = value_BZ.at[b.reset_slot_B].set(0.0, mode="drop")
        where = b.bias_slot_Z, b.bias_index_Z
        return (
            id_BZ.at[where].set(b.bias_id_Z, mode="drop"),
            value_BZ.at[where].set(b.bias_value_Z, mode="drop"),
        )

    counts_BV = jax.lax.fori_loop(0, num_resets, clear, counts_BV)
    counts_BV = jax.lax.fori_loop(
        0, _once(jnp.any(b.count_T != UNCOUNTED)), lambda _, c: _counted(c, b, ids_T), counts_BV
    )
    biases = (state.bias_id_BZ, state.bias_value_BZ)
    id_BZ, value_BZ = jax.lax.fori_loop(0, _once(num_resets > 0), bias, biases)
    return {"counts_BV": counts_BV, "bias_id_BZ": id_BZ, "bias_value_BZ": value_BZ}


def _once(condition: jax.Array) -> jax.Array:
    """Trips of a loop that does its body or not: a conditional could copy the carried arrays."""
    return condition.astype(jnp.int32)


def _counted(counts_BV: jax.Array, b: TextBatch, ids_T: jax.Array) -> jax.Array:
    nowhere = counts_BV.shape[0]
    seen_T = jnp.where(b.count_T == PROMPT_TOKEN, b.slot_T, nowhere)
    old_T = counts_BV.at[seen_T, ids_T].get(mode="clip")
    counts_BV = counts_BV.at[seen_T, ids_T].set(old_T | PROMPT_BIT, mode="drop")
    # Counting stops short of the prompt's bit, by the tokens that one batch can add.
    full = PROMPT_BIT - 1 - ids_T.shape[0]
    old_T = counts_BV.at[b.slot_T, ids_T].get(mode="clip") & (PROMPT_BIT - 1)
    add_T = jnp.where((b.count_T == ANSWER_TOKEN) & (old_T < full), b.slot_T, nowhere)
    return counts_BV.at[add_T, ids_T].add(1, mode="drop")


def sample_program(
    head: Any,
    state: DeviceState,
    hidden_RD: jax.Array,
    rows: jax.Array,
    *,
    family: Family,
    cfg: Any,
    backend: Backend,
    engine_config: EngineConfig,
    num_rows: int,
) -> tuple[SampleOutputs, DeviceState]:
    """Chooses the next token of every row and notes it in the row's slot; donate `state`.

    Args:
        head: `family.head(params)`.
        state: the device state.
        hidden_RD: what the text program gave.
        rows: int32 [sample_layout(engine_config, num_rows).size], packed `SampleRows`.
        family, cfg, backend, engine_config: static.
        num_rows: R, one of `sample_capacities(engine_config)` (static).

    Returns:
        The tokens and the state.
    """
    r = SampleRows(**layout.sample_layout(engine_config, num_rows).unpack(rows))
    logits_RV = family.logits(head, hidden_RD, cfg=cfg, backend=backend).astype(jnp.float32)
    outputs = sampling.sample(
        logits_RV,
        r,
        state.counts_BV,
        state.bias_id_BZ,
        state.bias_value_BZ,
        suppressed=suppressed_ids(family, cfg),
    )
    token_R = jnp.maximum(outputs.token_R, 0)

    def count(_: Any, counts_BV: jax.Array) -> jax.Array:
        old_R = counts_BV.at[r.slot_R, token_R].get(mode="clip")
        room_R = (r.counted_R > 0) & (old_R & (PROMPT_BIT - 1) < PROMPT_BIT - 1)
        counted_R = jnp.where(room_R, r.slot_R, counts_BV.shape[0])
        return counts_BV.at[counted_R, token_R].add(1, mode="drop")

    is_any = _once(jnp.any(r.counted_R > 0))
    return outputs, replace(
        state,
        last_token_B=state.last_token_B.at[r.slot_R].set(token_R, mode="drop"),
        counts_BV=jax.lax.fori_loop(0, is_any, count, state.counts_BV),
    )


def suppressed_ids(family: Family, cfg: Any) -> tuple[int, ...]:
    """Ids that are never answered: the placeholders and delimiters of media."""
    if cfg.vision is None:
        return ()
    geometry: VisionGeometry = family.geometry(cfg)
    ids = {
        geometry.image_token_id,
        geometry.video_token_id,
        geometry.vision_start_token_id,
        geometry.vision_end_token_id,
    }
    return tuple(sorted(i for i in ids if i < family.vocab_size(cfg)))


def encode_program(
    params_vision: Any,
    state: DeviceState,
    patches_PW: jax.Array,
    meta: jax.Array,
    layers_2: jax.Array,
    *,
    family: Family,
    cfg: Any,
    backend: Backend,
    num_patches: int,
) -> DeviceState:
    """Runs a range of tower layers over one packed call; donate `state` only.

    A call of many patches runs in several slices: they share `patches_PW` and `meta`, placed once,
    and hand their hidden rows on through the state.

    Args:
        params_vision: the params tree's `vision`.
        state: the device state.
        patches_PW: uint8, P over "model".
        meta: int32 [encode_layout(geometry, num_patches).size].
        layers_2: int32 first layer and one past the last.
        family, cfg, backend: static.
        num_patches: P, one of the patch capacities (static).

    Returns:
        The state, with the finished pool rows after the last slice.
    """
    assert state.pool_RJD is not None
    assert state.hidden_XPD is not None
    geometry = family.geometry(cfg)
    fields = layout.encode_layout(geometry, num_patches).unpack(meta)
    per_bin = num_patches // geometry.num_bins
    pool_RJD, hidden_PD = family.encoders["vision"](
        params_vision,
        state.pool_RJD,
        state.hidden_XPD[:, :per_bin].reshape(num_patches, -1),
        EncodeInputs(patches_PW=patches_PW, layers_2=layers_2, **fields),
        cfg=cfg,
        backend=backend,
    )
    return replace(
        state,
        pool_RJD=pool_RJD,
        hidden_XPD=state.hidden_XPD.at[:, :per_bin].set(
            hidden_PD.reshape(geometry.num_bins, per_bin, -1)
        ),
    )
