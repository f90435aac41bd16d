"""Measures a server: N streamed requests at a rate or at once against an OpenAI-compatible URL.

    python bench/serve.py --base-url http://127.0.0.1:8000 --workload random-mm-image

Prints times to the first token (TTFT), per output token (TPOT: mean of an answer), between chunks
(ITL) and end to end (E2E), throughput and failures. An answer that failed or is empty makes the
exit code 1.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

# The folder is not installed: run as a file, it finds its sibling as `bench.workloads` too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.workloads import SIZES, WORKLOADS, Workload, bodies


@dataclass(kw_only=True)
class Sample:
    """One request as its client saw it.

    Args:
        start_s, end_s: `time.perf_counter()` when it was sent and when it ended.
        token_times_s: arrival of each chunk with a choice that holds text or a role.
        completion_tokens: from the usage chunk; 0 when none came.
        prompt_tokens: likewise.
        text: of the answer.
        failure: what went wrong.
    """

    start_s: float
    end_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    failure: str | None = None


async def ask(client: httpx.AsyncClient, body: dict) -> Sample:
    """Sends one request and reads its stream."""
    sample = Sample(start_s=time.perf_counter())
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")[:300]
                sample.failure = f"HTTP {response.status_code}: {said}"
            else:
                await _read(response, sample)
    except httpx.HTTPError as error:
        sample.failure = f"{type(error).__name__}: {error}"
    sample.end_s = time.perf_counter()
    if sample.failure is None and not (sample.text and sample.completion_tokens):
        sample.failure = "empty answer"
    return sample


async def _read(response: httpx.Response, sample: Sample) -> None:
    done = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            sample.failure = str(chunk["error"].get("message"))
            return
        for choice in chunk["choices"]:
            if choice["finish_reason"] is None:
                sample.token_times_s.append(time.perf_counter())
                sample.text += choice["delta"].get("content") or ""
        if chunk.get("usage"):
            sample.completion_tokens = chunk["usage"]["completion_tokens"]
            sample.prompt_tokens = chunk["usage"]["prompt_tokens"]
    if not done:
        sample.failure = "the stream ended without [DONE]"


async def measure(client: httpx.AsyncClient, workload: Workload, model: str, seed: int) -> dict:
    """Runs a workload: the warm-ups, then the measured requests.

    Returns:
        The report: one object that `--json` prints as it is.
    """
    random = np.random.default_rng(seed + 1)
    requests = list(await asyncio.to_thread(lambda: list(bodies(workload, model, seed))))
    for body in requests[: workload.warmups]:
        warm = await ask(client, body)
        if warm.failure is not None:
            raise SystemExit(f"a warm-up failed: {warm.failure}")
    slots = asyncio.Semaphore(workload.concurrency or len(requests))

    async def one(body: dict) -> Sample:
        async with slots:
            return await ask(client, body)

    start_s = time.perf_counter()
    tasks = []
    for body in requests[workload.warmups :]:
        tasks.append(asyncio.create_task(one(body)))
        if workload.request_rate:
            await asyncio.sleep(random.exponential(1 / workload.request_rate))
    samples = await asyncio.gather(*tasks)
    return report(samples, time.perf_counter() - start_s)


def report(samples: Sequence[Sample], duration_s: float) -> dict:
    """Statistics over the requests that succeeded, and the failures."""
    good = [s for s in samples if s.failure is None]
    gaps_ms = [1e3 * gap for s in good for gap in np.diff(s.token_times_s)]
    spans_s = [(s, s.token_times_s[-1] - s.token_times_s[0]) for s in good]
    times_ms = {
        "ttft_ms": [1e3 * (s.token_times_s[0] - s.start_s) for s in good],
        "tpot_ms": [
            1e3 * span_s / (s.completion_tokens - 1)
            for s, span_s in spans_s
            if s.completion_tokens > 1
        ],
        "itl_ms": gaps_ms,
        "e2e_ms": [1e3 * (s.end_s - s.start_s) for s in good],
    }
    num_tokens = sum(s.completion_tokens for s in good)
    failures = [s.failure for s in samples if s.failure is not None]
    return {
        "requests": len(samples),
        "failures": len(failures),
        "first_failures": failures[:3],
        "duration_s": duration_s,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": num_tokens / duration_s,
        "total_tokens_per_s": (num_tokens + sum(s.prompt_tokens for s in good)) / duration_s,
        "prompt_tokens": sum(s.prompt_tokens for s in good),
        "output_tokens": num_tokens,
        "worst_gap_ms": max(gaps_ms, default=0.0),
        **{name: _summary(values) for name, values in times_ms.items()},
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "median": 0.0, "p99": 0.0}
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
    }


def show(result: dict) -> str:
    """The report as a table."""
    lines = [
        f"requests        {result['requests']}, failed {result['failures']}",
        f"duration        {result['duration_s']:.2f} s",
        f"throughput      {result['requests_per_s']:.2f} requests/s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s, "
        f"{result['total_tokens_per_s']:.1f} tokens/s",
        f"{'ms':<15} {'mean':>10} {'median':>10} {'p99':>10}",
    ]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        row = result[name]
        label = name.removesuffix("_ms").upper()
        lines.append(f"{label:<15} {row['mean']:>10.2f} {row['median']:>10.2f} {row['p99']:>10.2f}")
    lines.append(f"worst gap       {result['worst_gap_ms']:.2f} ms")
    lines += [f"failure         {text}" for text in result["first_failures"]]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; a size left out is the workload's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=["openai-chat"], default="openai-chat")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"))
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="random-text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    for spec in dataclasses.fields(Workload):
        flag = f"--{spec.name.replace('_', '-')}"
        if spec.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=spec.type)  # pyright: ignore[reportArgumentType]
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> dict:
    """Runs what the command line asks for."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    workload = dataclasses.replace(WORKLOADS[args.workload], **given)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with httpx.AsyncClient(
        base_url=args.base_url,
        headers=headers,
        timeout=args.timeout_s,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as client:
        model = args.model
        if model is None:
            answer = await client.get("/v1/models")
            answer.raise_for_status()
            model = answer.json()["data"][0]["id"]
        result = await measure(client, workload, model, args.seed)
    return {"workload": args.workload, "model": model, **dataclasses.asdict(workload), **result}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 when an answer failed or was empty."""
    args = parse(argv)
    result = asyncio.run(run(args))
    print(json.dumps(result) if args.json else show(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
