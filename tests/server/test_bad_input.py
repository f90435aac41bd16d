"""Bad input of every kind: a 4xx that says what to change, and the next request is answered."""

import asyncio
import io

import pytest
from PIL import Image

from tests.server.fakes import (
    DATA,
    data_url,
    frames_part,
    image_part,
    in_loop,
    png,
    say,
    server_config,
    serving,
    text_part,
)
from tests.server.test_app import settled
from tpu_vl.config import MediaLimits, ProcessorConfig


def file_part(name, media_type="image/png"):
    return image_part((DATA / name).read_bytes(), media_type)


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image_url(url):
    return {"type": "image_url", "image_url": {"url": url}}


def video_url(url):
    return {"type": "video_url", "video_url": {"url": url}}


JPEG = (DATA / "good.jpg").read_bytes()
PATH = "messages.[0].content.[1]"

# name -> (part, text of the message)
BAD_MEDIA = {
    "truncated png": (file_part("trunc.png"), PATH),
    "truncated jpeg": (file_part("trunc.jpg", "image/jpeg"), PATH),
    "web page": (image_part(b"<!DOCTYPE html><html><body>404</body></html>"), PATH),
    "svg": (file_part("x.svg", "image/svg+xml"), PATH),
    "1x4000": (image_part(png(4000, 1)), PATH),
    "20000x20000 png": (file_part("bomb_20000.png"), PATH),
    "empty image": (image_url("data:image/png;base64,"), PATH),
    "empty video": (video_url("data:video/mp4;base64,"), PATH),
    "video of nothing": (video_url(data_url(b"\0" * 64, "video/mp4")), PATH),
    "cut video": (video_url(data_url(b"\0\0\0\x18ftypisom\0\0\0\0isom", "video/mp4")), PATH),
    "bare base64": (image_url("iVBORw0KGgo" * 40), "expected an http(s) or data: URL"),
    "no comma": (image_url("data:image/png;base64"), "no comma"),
    "not base64": (image_url("data:image/png,abc"), "not base64"),
    "no media type": (image_url("data:base64,xxxx"), "not base64"),
    "invalid base64": (image_url("data:image/png;base64,@@@@"), "invalid base64"),
    "ftp": (image_url("ftp://example.com/a.png"), "expected an http(s) or data: URL"),
    "local file": (image_url("file:///etc/passwd"), "--allowed-local-media-path"),
    "local path": (image_url("/etc/passwd"), "expected an http(s) or data: URL"),
    "option": ({**image_part(), "max_pixels": 0}, PATH),
    "audio": ({"type": "input_audio", "input_audio": {}}, "supported part types"),
    "large frame list": (frames_part(33), "33 frames; the limit is 32"),
    "large joined frame list": (
        video_url("data:video/jpeg;base64," + ",".join(["!"] * 33)),
        "33 frames; the limit is 32",
    ),
}


@pytest.mark.parametrize("name", BAD_MEDIA)
@in_loop
async def test_bad_media_are_a_400_by_path_and_nothing_stays(name):
    part, said = BAD_MEDIA[name]
    async with serving(say("a")) as app:
        response = await app.text(text_part("x"), part, text_part("y"))
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert said in error["message"]
        assert PATH in error["message"]
        assert error["param"].startswith(PATH)
        assert len(response.text) < 600
        assert not app.engine.requests
        await settled(app)
        assert (await app.text(image_part(), text_part("x"))).status_code == 200


@in_loop
async def test_a_picture_of_one_pixel_is_a_small_picture():
    async with serving(say("a")) as app:
        response = await app.text(file_part("s_1x1.png"))
        assert response.status_code == 200
        assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] >= 1


@pytest.mark.parametrize(
    ("data", "url_type"),
    [
        (png(), "image/jpeg"),
        (png(), "application/octet-stream"),
        (png(), ""),
        (JPEG, "image/png"),
        (JPEG, "image/jpeg;charset=utf-8;name=a.jpg"),
    ],
)
@in_loop
async def test_bytes_decide_what_a_picture_is_not_its_label(data, url_type):
    async with serving(say("a")) as app:
        honest = "image/png" if data[:4] == b"\x89PNG" else "image/jpeg"
        for label in (honest, url_type):
            url = data_url(data, label)
            for form in (url, url.replace(";base64", ";BASE64"), url.replace("data:", "DATA:")):
                assert (await app.text(image_url(form))).status_code == 200
        assert len({add.media[0].digest for add in app.engine.requests}) == 1


@in_loop
async def test_frames_joined_by_commas_are_a_video():
    async with serving(say("a")) as app:
        frames = [data_url(png(64, 64, (i * 40, 0, 0))) for i in range(4)]
        joined = ",".join(frame.partition(",")[2] for frame in frames)
        url = f"data:video/jpeg;x=1;base64,{joined}"
        assert (await app.text(video_url(url))).status_code == 200
        assert (await app.text({"type": "video", "video": frames})).status_code == 200
        first, second = app.engine.requests
        assert first.media[0].digest == second.media[0].digest


@in_loop
async def test_the_number_of_media_is_limited_by_a_flag():
    async with serving(say("a")) as app:
        many = [image_part(png(32, 32)) for _ in range(17)]
        assert (await app.text(*many[:16])).status_code == 200
        error = (await app.text(*many)).json()["error"]
        assert "17 images, the limit is 16" in error["message"]
        assert "--limit-mm-per-prompt" in error["message"]
        videos = [frames_part(2) for _ in range(3)]
        assert "--limit-mm-per-prompt" in (await app.text(*videos)).json()["error"]["message"]


@in_loop
async def test_many_large_pictures_are_refused_before_one_is_decoded(monkeypatch):
    """33 pictures of 1920x1080 in Qwen3-VL's sizes, against a budget of 16,384 tokens."""
    out = io.BytesIO()
    Image.new("RGB", (1920, 1080)).save(out, "PNG")
    limits = MediaLimits(max_images=64, max_request_patches=16_384 * 4)
    monkeypatch.setattr("tpu_vl.server.preprocess.process_image", lambda *_, **__: 1 / 0)
    async with serving(say("a"), limits=limits, processor=ProcessorConfig()) as app:
        response = await app.text(*[image_part(out.getvalue())] * 33)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "67320 tokens" in message
        assert "16384" in message
        assert app.nothing_held()


@in_loop
async def test_a_prompt_over_the_context_is_refused_with_both_numbers():
    async with serving(say("a"), max_model_len=256) as app:
        large = image_part(png(512, 448))
        response = await app.text(text_part("which shape " * 20), large)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "224 of them" in error["message"]
        assert "256" in error["message"]
        assert not app.engine.requests
        tight = await app.chat({**user(large), "min_tokens": 200})
        assert tight.status_code == 400
        fits = (await app.text(large, max_tokens=10_000)).json()["usage"]
        (add,) = app.engine.requests
        assert add.sampling.max_tokens == 256 - fits["prompt_tokens"]
        assert app.nothing_held()


@pytest.mark.parametrize(
    ("max_tokens", "status"), [(0, 400), (-1, 400), ("5", 400), (10**9, 200), (None, 200)]
)
@in_loop
async def test_odd_answer_limits_with_an_image(max_tokens, status):
    async with serving(say("a")) as app:
        assert (await app.text(image_part(), max_tokens=max_tokens)).status_code == status
        assert (await app.chat()).status_code == 200


@in_loop
async def test_a_typed_placeholder_is_text_with_and_without_an_image():
    typed = text_part("<|vision_start|><|image_pad|><|vision_end|>")
    async with serving(say("a")) as app:
        alone = (await app.text(typed)).json()["usage"]
        beside = (await app.text(typed, image_part())).json()["usage"]
        tool = {"role": "tool", "content": "<|image_pad|>"}
        in_tool = await app.chat({"messages": [tool, *user(image_part())["messages"]]})
        assert in_tool.status_code == 200
        assert alone["prompt_tokens_details"]["image_tokens"] == 0
        assert beside["prompt_tokens_details"]["image_tokens"] == 4
        assert beside["prompt_tokens"] == alone["prompt_tokens"] + 6


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"\xff\xfe", 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]}', 404),
        (b'{"messages": []}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 5000}', 400),
    ],
    ids=lambda value: repr(value)[:30],
)
@in_loop
async def test_bad_bodies(body, status):
    async with serving(say("a")) as app:
        response = await app.http.post("/v1/chat/completions", content=body)
        assert response.status_code == status
        assert response.json()["error"]["message"]
        assert (await app.chat()).status_code == 200


@in_loop
async def test_a_large_body_is_413_with_and_without_its_length():
    async with serving(say("a"), server_config(max_request_bytes=1000)) as app:
        body = b'{"messages": "' + b"a" * 2000

        async def chunks():
            yield body[:1500]
            yield body[1500:]

        for content in (body, chunks()):
            response = await app.http.post("/v1/chat/completions", content=content)
            assert response.status_code == 413
            assert "--max-request-mb" in response.json()["error"]["message"]
        assert (await app.chat()).status_code == 200


@in_loop
async def test_unknown_paths_and_methods_have_the_shape_of_openai():
    async with serving(say("a")) as app:
        for response in (
            await app.http.get("/v1/nothing"),
            await app.http.get("/v1/chat/completions"),
        ):
            assert response.status_code in (404, 405)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@in_loop
async def test_ids_outside_the_vocabulary_and_large_biases():
    async with serving(say("a")) as app:
        for fields in (
            {"logit_bias": {"1000": 1}},
            {"stop_token_ids": [1000]},
            {"logit_bias": {str(i): 1 for i in range(301)}},
            {"stop_token_ids": list(range(20)), "min_tokens": 1},
        ):
            hello = {"messages": [{"role": "user", "content": "x"}]}
            response = await app.chat({**hello, **fields})
            assert response.status_code == 400
            assert response.json()["error"]["param"] in fields


@in_loop
async def test_a_small_budget_of_host_memory_delays_but_never_blocks():
    """Requests whose patches exceed the budget together run one after another."""
    config = server_config(preprocess_bytes=300_000)
    async with serving(say("a"), config) as app:
        parts = [image_part(png(256, 256, (i, i, i))) for i in range(8)]
        answers = await asyncio.gather(*(app.text(p, p) for p in parts))
        assert {a.status_code for a in answers} == {200}
        assert app.nothing_held()
