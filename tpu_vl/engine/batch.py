"""A step's rows as the padded numpy arrays that the programs take."""

from dataclasses import dataclass

import numpy as np

from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout
from tpu_vl.engine.layout import ANSWER_TOKEN, PROMPT_TOKEN
from tpu_vl.engine.scheduler import Row
from tpu_vl.engine.sequence import Sequence
from tpu_vl.engine.tower import TowerCall
from tpu_vl.models.family import VisionGeometry
from tpu_vl.vision.pack import fill_call

Views = dict[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """Inputs of one text program and of the sampling program behind it.

    Args:
        num_tokens: token capacity.
        num_rows: row capacity.
        text: packed `TextBatch`.
        sample: packed `SampleRows`; None: nothing is sampled.
        sampled: the sequence of each sampled row, in row order.
        wants_logprobs: some sampled row reports logprobs.
    """

    num_tokens: int
    num_rows: int
    text: np.ndarray
    sample: np.ndarray | None
    sampled: tuple[Sequence, ...]
    wants_logprobs: bool


def build_batch(rows: list[Row], engine_config: EngineConfig) -> Batch:
    """Lays a step's rows out one behind the other and pads them to a capacity.

    Args:
        rows: at least one; their tokens fit the largest capacity.
        engine_config: capacities.
    """
    total = sum(row.num_tokens for row in rows)
    capacity = next(t for t in engine_config.token_capacities if t >= total)
    text, views = layout.text_layout(engine_config, capacity).new()
    views["q_starts_B"][:] = total
    token = delta = bias = resets = 0
    sampled: list[Row] = []
    for i, row in enumerate(rows):
        end = token + row.num_tokens
        _put_tokens(views, row, slice(token, end))
        views["q_starts_B"][i] = token
        views["kv_lens_B"][i] = row.start + row.num_tokens
        views["slot_B"][i] = row.seq.slot
        delta = _put_pages(views, row, delta, engine_config.page_size)
        if row.resets:
            views["reset_slot_B"][resets] = row.seq.slot
            resets += 1
            bias = _put_bias(views, row.seq, bias)
        if row.samples:
            views["row_tokens_R"][len(sampled)] = end - 1
            sampled.append(row)
        token = end
    num_rows = engine_config.rows_of(capacity)
    return Batch(
        num_tokens=capacity,
        num_rows=num_rows,
        text=text,
        sample=_sample_rows(sampled, engine_config, num_rows) if sampled else None,
        sampled=tuple(row.seq for row in sampled),
        wants_logprobs=any(row.seq.sampling.num_logprobs >= 0 for row in sampled),
    )


def _put_tokens(views: Views, row: Row, where: slice) -> None:
    seq, start, end = row.seq, row.start, row.start + row.num_tokens
    prompt_end = min(end, seq.prompt_T.size)
    num_prompt = max(0, prompt_end - start)
    behind = slice(where.start + num_prompt, where.stop)
    if num_prompt:
        inside = slice(where.start, behind.start)
        views["ids_T"][inside] = seq.prompt_T[start:prompt_end]
        views["positions_XT"][:, inside] = seq.positions_XT[:, start:prompt_end]
        if seq.counted:
            views["count_T"][inside] = PROMPT_TOKEN
    if behind.start < behind.stop:
        first = start + num_prompt - seq.prompt_T.size
        # The newest token may still be on its way to the host: -1 takes it from the slot.
        known = seq.answer[first : end - seq.prompt_T.size]
        views["ids_T"][behind] = -1
        views["ids_T"][behind.start : behind.start + len(known)] = known
        views["positions_XT"][:, behind] = (
            np.arange(start + num_prompt, end, dtype=np.int32) + seq.position_delta
        )
        # A token is counted when it is sampled; a sequence that starts anew counts it again.
        restored = seq.num_restored - start - num_prompt
        if seq.counted and restored > 0:
            views["count_T"][behind][:restored] = ANSWER_TOKEN
    views["slot_T"][where] = seq.slot
    for frame, rows_M in row.frames:
        first, last = max(start, frame.start), min(end, frame.end)
        views["pool_row_T"][where.start + first - start : where.start + last - start] = rows_M[
            first - frame.start : last - frame.start
        ]


def _put_pages(views: Views, row: Row, delta: int, page_size: int) -> int:
    needed = -(-(row.start + row.num_tokens) // page_size)
    where = slice(delta, delta + needed - row.pages_sent)
    views["delta_slot_A"][where] = row.seq.slot
    views["delta_index_A"][where] = np.arange(row.pages_sent, needed)
    views["delta_page_A"][where] = row.seq.pages[row.pages_sent : needed]
    return where.stop


def _put_bias(views: Views, seq: Sequence, bias: int) -> int:
    if not seq.sampling.logit_bias:
        return bias
    ids, values = zip(*seq.sampling.logit_bias, strict=True)
    where = slice(bias, bias + len(ids))
    views["bias_slot_Z"][where] = seq.slot
    views["bias_index_Z"][where] = np.arange(len(ids))
    views["bias_id_Z"][where] = ids
    views["bias_value_Z"][where] = values
    return where.stop


def _sample_rows(rows: list[Row], engine_config: EngineConfig, num_rows: int) -> np.ndarray:
    packed, views = layout.sample_layout(engine_config, num_rows).new()
    for i, row in enumerate(rows):
        seq, s = row.seq, row.seq.sampling
        num_answers = row.start + row.num_tokens - seq.prompt_T.size
        views["slot_R"][i] = seq.slot
        views["seed_R"][i] = s.seed
        views["step_R"][i] = num_answers
        views["temperature_R"][i] = s.temperature
        views["top_k_R"][i] = s.top_k
        views["top_p_R"][i] = s.top_p
        views["min_p_R"][i] = s.min_p
        views["repetition_R"][i] = s.repetition_penalty
        views["presence_R"][i] = s.presence_penalty
        views["frequency_R"][i] = s.frequency_penalty
        views["counted_R"][i] = seq.counted
        views["biased_R"][i] = bool(s.logit_bias)
        views["num_logprobs_R"][i] = s.num_logprobs
        if num_answers < s.min_tokens:
            views["stop_ids_RS"][i, : len(s.stop_token_ids)] = s.stop_token_ids
    return packed


def build_call(call: TowerCall, geometry: VisionGeometry) -> tuple[np.ndarray, np.ndarray]:
    """The patches (uint8 [P, W]) and the packed metadata of a tower call."""
    arrays = fill_call(
        call.packed,
        call.patches,
        call.rows,
        side=geometry.position_side,
        merge_size=geometry.merge_size,
        layers=(0, geometry.depth),
    )
    packed, views = layout.encode_layout(geometry, call.packed.capacity).new()
    for name, view in views.items():
        view[...] = arrays[name]
    return arrays["patches_PW"], packed
