"""What a step's packed arrays hold: positions of a chunk, pages, counts, stops, logprobs."""

import numpy as np

from tests.engine.toy import (
    CONFIG,
    GEOMETRY,
    VOCAB,
    chunked,
    make_engine,
    medium,
    request,
    run,
    tokens,
)
from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout
from tpu_vl.engine.batch import Batch, build_batch
from tpu_vl.engine.layout import ANSWER_TOKEN, NO_TOKEN, PROMPT_TOKEN, UNCOUNTED
from tpu_vl.engine.scheduler import Scheduler
from tpu_vl.engine.sequence import Sequence, make_sequence


def add(scheduler: Scheduler, message, config: EngineConfig = CONFIG) -> Sequence:
    seq = make_sequence(
        message, len(scheduler.running), engine_config=config, geometry=GEOMETRY, vocab_size=VOCAB
    )
    scheduler.add(seq)
    return seq


def next_batch(scheduler: Scheduler, config: EngineConfig = CONFIG) -> Batch:
    return build_batch(scheduler.schedule().rows, config)


def fields(packed: np.ndarray, of: layout.Layout) -> dict[str, np.ndarray]:
    return {
        f.name: packed[f.offset : f.offset + f.num_words].view(f.dtype).reshape(f.shape)
        for f in of.fields
    }


def test_each_chunk_has_the_positions_of_its_own_tokens():
    """A prompt of 40 tokens in chunks of 32: 32 positions, then 8."""
    config = chunked(32)
    scheduler = Scheduler(config, GEOMETRY)
    message = request("r", [[1] * 4, medium(6, 1, 8, 16), [2] * 2])
    seq = add(scheduler, message, config)
    assert seq.prompt_T.size == 40
    done = 0
    for expected in (32, 8):
        batch = next_batch(scheduler, config)
        view = fields(batch.text, layout.text_layout(config, batch.num_tokens))
        assert view["q_starts_B"][-1] == expected
        np.testing.assert_array_equal(
            view["positions_XT"][:, :expected], seq.positions_XT[:, done : done + expected]
        )
        assert (view["slot_T"][:expected] == seq.slot).all()
        assert (view["slot_T"][expected:] == config.max_num_seqs).all()
        done += expected
        assert view["kv_lens_B"][0] == done
    decode = next_batch(scheduler, config)
    view = fields(decode.text, layout.text_layout(config, decode.num_tokens))
    assert (view["positions_XT"][:, 0] == 40 + seq.position_delta).all()
    assert seq.position_delta == -24
    assert view["ids_T"][0] == -1  # the token is not on the host yet


def test_a_mixed_step_has_positions_of_every_row():
    scheduler = Scheduler(CONFIG, GEOMETRY)
    first = add(scheduler, request("first", [[1], medium(1, 1, 4, 6), [2]]))
    next_batch(scheduler)
    second = add(scheduler, request("second", [medium(2, 1, 8, 8), [3] * 3]))
    view = fields(next_batch(scheduler).text, layout.text_layout(CONFIG, 64))
    num_prompt = second.prompt_T.size
    assert view["q_starts_B"][:3].tolist() == [0, 1, 1 + num_prompt]
    assert (view["positions_XT"][:, 0] == first.prompt_T.size + first.position_delta).all()
    np.testing.assert_array_equal(view["positions_XT"][:, 1 : 1 + num_prompt], second.positions_XT)
    assert view["pool_row_T"][0] == -1
    assert (view["pool_row_T"][2:18] >= 0).all()


def test_pages_are_sent_once_and_only_as_tokens_reach_them():
    config = chunked(7)
    scheduler = Scheduler(config, GEOMETRY)
    seq = add(scheduler, request("r", [[1] * 20]), config)
    sent = []
    for _ in range(5):
        view = fields(next_batch(scheduler, config).text, layout.text_layout(config, 7))
        used = view["delta_slot_A"] == seq.slot
        sent += zip(view["delta_index_A"][used], view["delta_page_A"][used], strict=True)
    assert sent == list(enumerate(seq.pages))


def test_tokens_are_counted_only_where_a_penalty_reads_them():
    for penalty, kind in ((1.0, UNCOUNTED), (1.2, PROMPT_TOKEN)):
        scheduler = Scheduler(CONFIG, GEOMETRY)
        add(scheduler, request("r", [[1] * 5], repetition_penalty=penalty))
        view = fields(next_batch(scheduler).text, layout.text_layout(CONFIG, 16))
        assert (view["count_T"][:5] == kind).all()
        assert (view["count_T"][5:] == UNCOUNTED).all()
        view = fields(next_batch(scheduler).text, layout.text_layout(CONFIG, 16))
        assert (view["count_T"] == UNCOUNTED).all()  # it was counted when it was sampled


def test_a_restarted_sequence_counts_its_answer_again():
    scheduler = Scheduler(CONFIG, GEOMETRY)
    seq = add(scheduler, request("r", [[1] * 5], presence_penalty=1.0))
    next_batch(scheduler)
    seq.num_pending, seq.answer = 0, [7]
    scheduler._preempt(seq)
    view = fields(next_batch(scheduler).text, layout.text_layout(CONFIG, 16))
    assert view["ids_T"][:6].tolist() == [1] * 5 + [7]
    assert view["count_T"][:6].tolist() == [PROMPT_TOKEN] * 5 + [ANSWER_TOKEN]
    assert view["reset_slot_B"][0] == seq.slot


def test_stops_are_held_back_for_min_tokens_only():
    scheduler = Scheduler(CONFIG, GEOMETRY)
    add(scheduler, request("r", [[1]], stop_token_ids=(4, 9), min_tokens=2))
    held = []
    for _ in range(3):
        sample = next_batch(scheduler).sample
        assert sample is not None
        view = fields(sample, layout.sample_layout(CONFIG, 16))
        assert view["step_R"][0] == len(held)
        held.append(view["stop_ids_RS"][0][view["stop_ids_RS"][0] != NO_TOKEN].tolist())
    assert held == [[4, 9], [4, 9], []]


def test_biases_of_one_step_never_exceed_their_capacity():
    bias = tuple((i % 40, 0.5) for i in range(200))
    scheduler = Scheduler(CONFIG, GEOMETRY)
    seqs = [add(scheduler, request(f"r{i}", [[i]], logit_bias=bias)) for i in range(3)]
    firsts = [[row.seq for row in scheduler.schedule().rows if row.resets] for _ in range(3)]
    assert firsts == [[seq] for seq in seqs]


def test_a_mutated_batch_changes_answers(monkeypatch):
    """The toy sees what the batch says: a flat delta or a swapped frame shows in the tokens."""
    message = request("r", [[1], medium(1, 1, 4, 6), medium(2, 1, 4, 6), [2]])
    right = tokens(run(make_engine(), [message])["r"])
    for name in ("positions_XT", "pool_row_T", "delta_page_A", "ids_T", "slot_T"):

        def mutated(rows, config, name=name):
            batch = build_batch(rows, config)
            view = fields(batch.text, layout.text_layout(config, batch.num_tokens))[name]
            view[..., :6] = view[..., :6][..., ::-1].copy()
            return batch

        monkeypatch.setattr("tpu_vl.engine.engine.build_batch", mutated)
        assert tokens(run(make_engine(), [message])["r"]) != right, name
