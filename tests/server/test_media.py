"""Addresses of a request: local files, counting, cancelling."""

import asyncio
import os

import pytest

from tests.server.fakes import data_url, in_loop, png
from tests.server.test_http_fetch import silence, site
from tpu_vl.config import MediaLimits
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.server.media import MediaFetcher
from tpu_vl.types import MediaKind, MediaPart


def part(*urls, kind: MediaKind = "image"):
    return MediaPart(kind=kind, urls=urls, param="messages.[0].content.[0]")


async def fetch(*parts, limits=None, request_bytes=1 << 20):
    return await MediaFetcher(limits or MediaLimits(), request_bytes).fetch(parts)


@pytest.fixture
def root(tmp_path):
    """A media folder with a picture, and next to it a secret with links to it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    media = tmp_path / "media"
    (media / "sub").mkdir(parents=True)
    (media / "sub" / "a b.png").write_bytes(b"picture")
    (media / "good").symlink_to(media / "sub" / "a b.png")
    (media / "link").symlink_to(tmp_path / "secret.png")
    (media / "folder").symlink_to(tmp_path)
    os.mkfifo(media / "pipe")
    return media


@in_loop
async def test_files_inside_the_folder_are_read(root):
    limits = MediaLimits(allowed_local_media_path=str(root))
    for path in ("sub/a%20b.png", "good", "sub/../good"):
        for host in ("", "localhost"):
            (files,) = await fetch(part(f"file://{host}{root}/{path}"), limits=limits)
            assert files == [b"picture"]


@in_loop
async def test_everything_else_is_refused_in_the_same_words(root):
    limits = MediaLimits(allowed_local_media_path=str(root))
    said = set()
    for url in (
        f"file://{root}/../secret.png",
        f"file://{root}/%2e%2e/secret.png",
        f"file://{root}/link",
        f"file://{root}/folder/secret.png",
        f"file://{root}/missing.png",
        f"file://{root}/sub",
        f"file://{root}/pipe",
        f"file://{root}-not/x",
        f"file://host{root}/good",
        "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "file:///etc/missing",
        "file:///a\0b",
        "file:good",
    ):
        with pytest.raises(MediaError) as caught:
            await asyncio.wait_for(fetch(part(url), limits=limits), 2)
        said.add(caught.value.message)
    assert len(said) == 1


@in_loop
async def test_files_are_refused_without_a_folder(root):
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        await fetch(part(f"file://{root}/good"))


@in_loop
async def test_a_large_file_is_refused(root):
    limits = MediaLimits(allowed_local_media_path=str(root), max_bytes=3)
    with pytest.raises(MediaTooLargeError, match="3 bytes"):
        await fetch(part(f"file://{root}/good"), limits=limits)
    with pytest.raises(MediaTooLargeError, match="3 bytes"):
        await fetch(part(data_url(b"x" * 9)), limits=limits)


@in_loop
async def test_all_media_of_a_request_count_together():
    url = data_url(b"x" * 600)
    assert len(await fetch(part(url), request_bytes=1000)) == 1
    with pytest.raises(MediaTooLargeError, match="--max-request-mb"):
        await fetch(part(url), part(url), request_bytes=1000)


@in_loop
async def test_files_come_back_in_the_order_of_their_parts():
    parts = [part(data_url(b"a")), part(data_url(b"b"), data_url(b"c"), kind="video")]
    assert await fetch(*parts) == [[b"a"], [b"b", b"c"]]


@in_loop
async def test_frame_lists_are_counted_before_they_are_decoded():
    limits = MediaLimits(max_video_frames=4)
    urls = [data_url(png(8, 8))] * 2
    joined = "data:video/jpeg;base64," + "!" + ",!" * 2
    with pytest.raises(MediaTooLargeError, match="5 frames; the limit is 4"):
        await fetch(part(*urls, joined, kind="video"), limits=limits)


@pytest.mark.parametrize("text", ["eA==", "eA", "e A=\n=", "eA%3D%3D"])
@in_loop
async def test_base64_is_read_with_the_freedoms_that_clients_take(text):
    assert await fetch(part(f"data:image/png;base64,{text}")) == [[b"x"]]


@in_loop
async def test_url_safe_base64():
    assert await fetch(part("data:;base64,-_8")) == [[b"\xfb\xff"]]


@in_loop
async def test_one_failure_ends_the_other_downloads():
    limits = MediaLimits(allow_private_addresses=True, fetch_timeout_s=5)
    async with site(slow=silence) as pages:
        parts = [part(f"{pages.url}/slow"), part("data:image/png;base64,@")]
        with pytest.raises(MediaError, match="invalid base64"):
            await asyncio.wait_for(fetch(*parts, limits=limits), 2)
