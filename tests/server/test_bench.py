"""The benchmark client against a scripted server."""

import json

import httpx
import pytest

from bench.serve import Sample, main, report
from bench.workloads import WORKLOADS, bodies
from tests.server.fakes import TOKENIZER, listening, say
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.engine.messages import Output


def tokens(add):
    """As many tokens as asked for, a few milliseconds apart."""
    (token_id,) = TOKENIZER.encode("a")
    for index in range(add.sampling.max_tokens):
        last = index == add.sampling.max_tokens - 1
        yield Output(
            request_id=add.request_id,
            token_ids=(token_id,),
            finish_reason="length" if last else None,
        )


def run(url, workload, *flags):
    small = ("--num-prompts=4", "--warmups=1", "--input-words=5", "--output-tokens=6", "--json")
    return main([f"--base-url={url}", f"--workload={workload}", *small, *flags])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_runs(workload, capsys):
    limits = MediaLimits(max_images=2)
    with listening(tokens, limits=limits, processor=ProcessorConfig(image_min_pixels=1024)) as (
        url,
        engine,
        _,
    ):
        assert run(url, workload, "--concurrency=2", "--width=64", "--height=64") == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["requests"], result["failures"]) == (4, 0)
        assert result["output_tokens"] == 24
        assert result["model"] == "tiny"
        assert len(engine.requests) == 5
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            row = result[name]
            assert 0 < row["median"] <= row["p99"]
        assert result["worst_gap_ms"] >= result["itl_ms"]["p99"]
        kinds = [medium.kind for medium in engine.requests[0].media]
        assert kinds == {"random-text": [], "random-mm-image": ["image"]}.get(workload, ["video"])
        if kinds == ["video"]:
            assert engine.requests[0].media[0].grid_thw == (8, 4, 4)
        if kinds:
            assert len({add.media[0].digest for add in engine.requests}) == 5


def test_requests_are_sent_at_a_rate(capsys):
    with listening(tokens) as (url, _, _):
        assert run(url, "random-text", "--request-rate=10") == 0
    assert json.loads(capsys.readouterr().out)["duration_s"] > 0.05


def test_the_table_is_printed(capsys):
    with listening(tokens) as (url, _, _):
        flags = ["--num-prompts=2", "--output-tokens=3", "--input-words=3"]
        assert main([f"--base-url={url}", *flags]) == 0
    shown = capsys.readouterr().out
    for label in ("TTFT", "TPOT", "ITL", "E2E", "worst gap", "tokens/s", "failed 0"):
        assert label in shown


def empty(add):
    yield Output(request_id=add.request_id, finish_reason="length")


def broken(add):
    yield Output(request_id=add.request_id, token_ids=tuple(TOKENIZER.encode("a")))
    yield Output(request_id=add.request_id, finish_reason="error", error="lost a page")


@pytest.mark.parametrize(
    ("script", "said"), [(empty, "empty answer"), (broken, "lost a page")], ids=["empty", "broken"]
)
def test_a_bad_answer_fails_the_run(script, said, capsys):
    with listening(script) as (url, _, _):
        assert run(url, "random-text", "--warmups=0") == 1
        result = json.loads(capsys.readouterr().out)
        assert result["failures"] == 4
        assert said in result["first_failures"][0]
        with pytest.raises(SystemExit, match="warm-up failed"):
            run(url, "random-text")


def test_a_refused_request_is_a_failure(capsys):
    with listening(say("a"), max_model_len=40) as (url, _, _):
        assert run(url, "random-text", "--warmups=0", "--input-words=100") == 1
    assert "HTTP 400" in json.loads(capsys.readouterr().out)["first_failures"][0]


def test_a_server_that_is_not_there():
    with pytest.raises(httpx.ConnectError):
        main(["--base-url=http://127.0.0.1:9"])


def test_times_of_a_sample():
    sample = Sample(start_s=1.0, end_s=3.0, token_times_s=[1.5, 1.6, 2.5], completion_tokens=3)
    result = report([sample], 2.0)
    assert result["ttft_ms"]["mean"] == pytest.approx(500)
    assert result["tpot_ms"]["mean"] == pytest.approx(500)
    assert result["worst_gap_ms"] == pytest.approx(900)
    assert result["itl_ms"]["median"] == pytest.approx(500)
    assert result["e2e_ms"]["p99"] == pytest.approx(2000)
    assert result["output_tokens_per_s"] == pytest.approx(1.5)


def test_the_video_workload_is_the_named_one():
    video = WORKLOADS["random-mm-video"]
    assert (video.num_prompts, video.concurrency, video.output_tokens) == (640, 128, 1024)
    assert (video.width, video.height, video.num_frames, video.num_videos) == (256, 256, 16, 1)
    (first, *_) = bodies(WORKLOADS["random-text"], "m", 0)
    assert len(first["messages"][0]["content"][0]["text"].split()) == 500
