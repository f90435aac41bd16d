"""What cannot be served is refused with a remedy; the next request is answered, nothing is held."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.e2e.conftest import Served
from tests.e2e.media import Pool, clip, data_url, image_part, picture, text_part, video_part

DATA = Path(__file__).resolve().parents[1] / "data"


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(out, format="PNG")
    return out.getvalue()


def ask(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return client.post("/v1/chat/completions", json=body)


def check_next(client: httpx.Client) -> None:
    answer = ask(client, [image_part(png(64, 64)), text_part("What shape is this?")])
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 9


@pytest.mark.parametrize(
    ("part", "status", "named"),
    [
        (image_part((DATA / "trunc.jpg").read_bytes()), 400, "truncated"),
        (image_part(b"<!doctype html><html></html>"), 400, "HTML"),
        (image_part(png(1, 4000)), 400, "200 times"),
        (image_part((DATA / "bomb_20000.png").read_bytes()), 400, "20000 x 20000"),
        (video_part(b""), 400, "empty"),
        (video_part(b"\0\0\0\x18ftypmp42"), 400, "video"),
        ({"type": "image_url", "image_url": {"url": "ftp://x/y.png"}}, 400, "http(s) or data:"),
        ({"type": "audio", "audio": "x"}, 400, "supported part types"),
        (text_part("word " * 5000), 400, "--max-model-len"),
    ],
    ids=["cut", "html", "thin", "bomb", "no-video", "stub-video", "scheme", "type", "context"],
)
def test_bad_part_is_a_clear_error(
    client: httpx.Client, part: dict[str, Any], status: int, named: str
) -> None:
    answer = ask(client, [text_part("look"), part])
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 600
    check_next(client)


def test_one_pixel_and_typed_markers_are_served(client: httpx.Client) -> None:
    answer = ask(client, [image_part(png(1, 1)), text_part("<|image_pad|> what is it?")])
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 9


def test_wrong_model_and_wrong_json(client: httpx.Client) -> None:
    answer = ask(client, "x", model="gpt-nope")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = client.post("/v1/chat/completions", content=b'{"messages": [')
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]
    check_next(client)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_leaves_nothing(
    served: Served, client: httpx.Client, stream: bool
) -> None:
    pool = Pool(seed=3)
    content = [video_part(clip(pool.rng, 12, 64, 64, 8)), image_part(picture(pool.rng, 90, 90))]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body, timeout=0.4)
    served.wait_idle(timeout_s=5)
    check_next(client)


def test_urls_are_never_echoed(client: httpx.Client) -> None:
    secret = data_url(b"secret payload that must not come back")
    answer = ask(client, [{"type": "image_url", "image_url": {"url": secret}}])
    assert answer.status_code == 400
    assert secret[30:50] not in answer.text
