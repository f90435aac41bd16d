"""What `make demo` does once the server is up: ask about the bundled media, stream the answers."""

import json
import logging
import time
from dataclasses import dataclass

from openai import OpenAI, OpenAIError

from tpu_vl.demo import MEDIA, NOTICE
from tpu_vl.demo.encode import data_url

_TIMEOUT_S = 120.0
_MAX_TOKENS = 16
_PARTS = {".png": ("image_url", "image/png"), ".mp4": ("video_url", "video/mp4")}


@dataclass(frozen=True, kw_only=True)
class _Streamed:
    text: str
    num_tokens: int
    first_token_s: float
    total_s: float

    def timing(self) -> str:
        # Over the whole request: an answer of two tokens has no rate behind its first one.
        rate = self.num_tokens / self.total_s
        return f"time to first token {self.first_token_s * 1e3:.0f} ms, {rate:.1f} tokens/s"


def ask(base_url: str) -> int:
    """Asks a running server about the bundled picture and clip and prints the answers.

    Args:
        base_url: of the server, such as http://127.0.0.1:8000.

    Returns:
        The exit code: 0 only if every answer is the right one.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # its lines would break into the answers
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=_TIMEOUT_S, max_retries=0)
    all_right = True
    try:
        model = client.models.list().data[0].id
        for item in json.loads((MEDIA / "answers.json").read_text()):
            print(f"\n{item['file']}: {item['question']}\n  ", end="", flush=True)
            streamed = _stream(client, model, item["file"], item["question"])
            right = streamed.text.strip() == item["answer"]
            all_right &= right
            print(f"\n  [{'right' if right else 'wrong, it is ' + item['answer']}; ", end="")
            print(f"{streamed.timing()}]")
    except OpenAIError as error:
        print(f"\nthe server did not answer: {error}")
        return 1
    print(f"\n{NOTICE}")
    return 0 if all_right else 1


def _stream(client: OpenAI, model: str, file: str, question: str) -> _Streamed:
    path = MEDIA / file
    part_type, media_type = _PARTS[path.suffix]
    part = {"type": part_type, part_type: {"url": data_url(media_type, path.read_bytes())}}
    content = [part, {"type": "text", "text": question}]
    started_s = time.perf_counter()
    first_token_s = 0.0
    pieces: list[str] = []
    num_tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],  # pyright: ignore[reportArgumentType]
        temperature=0.0,
        max_tokens=_MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first_token_s = first_token_s or time.perf_counter() - started_s
            pieces.append(piece)
            print(piece, end="", flush=True)
    return _Streamed(
        text="".join(pieces),
        num_tokens=num_tokens,
        first_token_s=first_token_s,
        total_s=time.perf_counter() - started_s,
    )
