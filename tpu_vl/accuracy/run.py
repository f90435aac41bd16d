"""The accuracy gate: sends a suite through the API, scores the answers, holds them to marks."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tpu_vl.accuracy.suite import Question, questions
from tpu_vl.errors import ConfigError

_MARKS = Path(__file__).with_name("marks.json")
_REQUEST_TIMEOUT_S = 120.0
_MAX_TOKENS = 16
_MAX_EXAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Answers of one task.

    Args:
        num_samples: questions sent.
        num_right: answers equal to the right one, failed requests counting as wrong.
    """

    num_samples: int
    num_right: int

    @property
    def share(self) -> float:
        """Share of right answers, in [0, 1]."""
        return self.num_right / self.num_samples


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a run of a suite gave.

    Args:
        suite, model: what was asked of what.
        tasks: task -> score.
        num_requests: requests sent.
        num_failed: requests without a 200 answer.
        num_empty: answers of no token.
        num_generated_tokens: of all answers, as the server counts them.
        examples: the first wrong answers and failures, for the reader.
    """

    suite: str
    model: str
    tasks: Mapping[str, TaskScore]
    num_requests: int
    num_failed: int
    num_empty: int
    num_generated_tokens: int
    examples: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, with the share of each task."""
        tasks = {name: {**asdict(s), "share": round(s.share, 4)} for name, s in self.tasks.items()}
        return {**asdict(self), "tasks": tasks}


@dataclass(frozen=True, kw_only=True)
class _Reply:
    text: str = ""
    num_tokens: int = 0
    error: str | None = None


def evaluate(
    base_url: str,
    suite: str,
    *,
    num_samples: int,
    concurrency: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Scores:
    """Asks a running server every question of a suite.

    Args:
        base_url: of the server, such as http://127.0.0.1:8000.
        suite: name of the suite.
        num_samples: questions per task.
        concurrency: requests at once, >= 1.
        transport: how requests travel; None: over the network.

    Raises:
        ConfigError: an unknown suite, a number out of range, or no server at `base_url`.
    """
    if concurrency < 1:
        raise ConfigError(f"--concurrency {concurrency} must be at least 1")
    asked = list(questions(suite, num_samples))
    model, replies = asyncio.run(_ask_all(base_url, asked, concurrency, transport))
    return _score(suite, model, asked, replies)


async def _ask_all(
    base_url: str,
    asked: list[Question],
    concurrency: int,
    transport: httpx.AsyncBaseTransport | None,
) -> tuple[str, list[_Reply]]:
    limit = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=_REQUEST_TIMEOUT_S, transport=transport, trust_env=False
    ) as client:
        model = await _model_name(client)

        async def one(question: Question) -> _Reply:
            async with limit:
                return await _ask(client, model, question)

        return model, await asyncio.gather(*map(one, asked))


async def _model_name(client: httpx.AsyncClient) -> str:
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"no model is served at {client.base_url} ({error!r}); start `tpu-vl serve` or change "
            "--base-url"
        ) from error


async def _ask(client: httpx.AsyncClient, model: str, question: Question) -> _Reply:
    body = {
        "model": model,
        "messages": question.messages,
        "temperature": 0,
        "max_tokens": _MAX_TOKENS,
    }
    try:
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            return _Reply(error=f"status {answer.status_code}: {answer.text[:200]}")
        data = answer.json()
        text = data["choices"][0]["message"]["content"] or ""
        return _Reply(text=text, num_tokens=int(data["usage"]["completion_tokens"]))
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return _Reply(error=repr(error))


def _score(suite: str, model: str, asked: list[Question], replies: list[_Reply]) -> Scores:
    totals: dict[str, list[int]] = {}
    examples: list[str] = []
    for question, reply in zip(asked, replies, strict=True):
        right = reply.error is None and reply.text.strip() == question.answer
        total = totals.setdefault(question.task, [0, 0])
        total[0] += 1
        total[1] += right
        if not right and len(examples) < _MAX_EXAMPLES:
            got = reply.error or repr(reply.text)
            examples.append(f"{question.task} {question.index}: {question.answer!r}, got {got}")
    answered = [reply for reply in replies if reply.error is None]
    return Scores(
        suite=suite,
        model=model,
        tasks={task: TaskScore(num_samples=n, num_right=r) for task, (n, r) in totals.items()},
        num_requests=len(replies),
        num_failed=len(replies) - len(answered),
        num_empty=sum(reply.num_tokens == 0 for reply in answered),
        num_generated_tokens=sum(reply.num_tokens for reply in answered),
        examples=examples,
    )


def read_marks(suite: str, dtype: str) -> dict[str, float]:
    """The least share of right answers per task that passes.

    Args:
        suite: name of the suite.
        dtype: "float32" or "bfloat16"; "served" for a server whose dtype is not known.

    Raises:
        ConfigError: the repository holds no marks for them.
    """
    marks = json.loads(_MARKS.read_text(encoding="utf-8"))
    try:
        return marks[suite][dtype]
    except KeyError:
        known = [f"{s}/{d}" for s, of_suite in marks.items() for d in of_suite]
        raise ConfigError(
            f"no marks for suite {suite} in {dtype}; there are marks for {', '.join(known)}"
        ) from None


def verdict(scores: Scores, marks: Mapping[str, float]) -> list[str]:
    """Why a run does not pass, a line per reason; empty when it passes.

    Args:
        scores: of a run.
        marks: from `read_marks`; every task must have one and every mark its task.
    """
    reasons = []
    if scores.num_failed:
        reasons.append(f"{scores.num_failed} of {scores.num_requests} requests failed")
    if scores.num_empty:
        reasons.append(f"{scores.num_empty} of {scores.num_requests} answers have no token")
    if scores.num_generated_tokens == 0:
        reasons.append("the server generated no token at all")
    for task in sorted({*marks, *scores.tasks}):
        if task not in scores.tasks or task not in marks:
            missing = "answer" if task in marks else "mark"
            reasons.append(f"{task}: there is no {missing}")
        elif scores.tasks[task].share < marks[task]:
            reasons.append(f"{task}: {scores.tasks[task].share:.3f} is below {marks[task]:.3f}")
    return reasons
