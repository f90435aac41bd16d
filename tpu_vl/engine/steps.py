"""The three pure functions that every program on the request path is compiled from."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout, sampling
from tpu_vl.engine.layout import ANSWER_TOKEN, PROMPT_BIT, PROMPT_TOKEN, SampleRows, TextBatch
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
    bias_value_BZ = state.bias_value_BZ.at[b.reset_slot_B].set(0.0, mode="drop")
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
        counts_BV=_counted(state.counts_BV.at[b.reset_slot_B].set(0, mode="drop"), b, ids_T),
        bias_id_BZ=state.bias_id_BZ.at[b.bias_slot_Z, b.bias_index_Z].set(b.bias_id_Z, mode="drop"),
        bias_value_BZ=bias_value_BZ.at[b.bias_slot_Z, b.bias_index_Z].set(
            b.bias_value_Z, mode="drop"
        ),
    )


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
        logits_RV[:, : family.vocab_size(cfg)],
        r,
        state.counts_BV,
        state.bias_id_BZ,
        state.bias_value_BZ,
        suppressed=suppressed_ids(family, cfg),
    )
    token_R = jnp.maximum(outputs.token_R, 0)
    old_R = state.counts_BV.at[r.slot_R, token_R].get(mode="clip")
    room_R = (r.counted_R > 0) & (old_R & (PROMPT_BIT - 1) < PROMPT_BIT - 1)
    counted_R = jnp.where(room_R, r.slot_R, state.counts_BV.shape[0])
    return outputs, replace(
        state,
        last_token_B=state.last_token_B.at[r.slot_R].set(token_R, mode="drop"),
        counts_BV=state.counts_BV.at[counted_R, token_R].add(1, mode="drop"),
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
    assert state.hidden_PD is not None
    fields = layout.encode_layout(family.geometry(cfg), num_patches).unpack(meta)
    pool_RJD, hidden_PD = family.encoders["vision"](
        params_vision,
        state.pool_RJD,
        state.hidden_PD[:num_patches],
        EncodeInputs(patches_PW=patches_PW, layers_2=layers_2, **fields),
        cfg=cfg,
        backend=backend,
    )
    return replace(
        state,
        pool_RJD=pool_RJD,
        hidden_PD=state.hidden_PD.at[:num_patches].set(hidden_PD),
    )
