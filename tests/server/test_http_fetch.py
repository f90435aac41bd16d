"""Downloads: which addresses are refused, what is pinned, how long and how much."""

import asyncio
import contextlib
import ipaddress
import socket
import time

import httpx
import pytest

from tests.server.fakes import free_port, in_loop, png
from tpu_vl.config import MediaLimits
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.server.http_fetch import HttpFetcher, is_public

OPEN = MediaLimits(allow_private_addresses=True, fetch_timeout_s=5, max_bytes=10_000)
HASTY = MediaLimits(allow_private_addresses=True, fetch_timeout_s=0.5)
CLOSED = MediaLimits(fetch_timeout_s=5, max_bytes=10_000)


def answer(body=b"", status="200 OK", **headers):
    """The bytes of an HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Site:
    """A web server whose paths are scripts; notes the head of each request."""

    def __init__(self, **paths):
        self.paths = paths
        self.heads = []
        self.port = 0
        self.url = ""
        self.tasks = set()

    async def serve(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        try:
            await self.play(reader, writer)
        finally:
            writer.close()

    async def play(self, reader, writer):
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            script = self.paths[head.split()[1].strip("/").partition("?")[0]]
            if isinstance(script, bytes):
                writer.write(script)
            else:
                await script(writer)
            await writer.drain()


@contextlib.asynccontextmanager
async def site(**paths):
    pages = Site(**paths)
    server = await asyncio.start_server(pages.serve, "127.0.0.1", 0)
    pages.port = server.sockets[0].getsockname()[1]
    pages.url = f"http://localhost:{pages.port}"
    try:
        yield pages
    finally:
        server.close()
        for task in pages.tasks:
            task.cancel()
        await asyncio.gather(*pages.tasks)
        await asyncio.sleep(0)


async def fetch(url, limits=OPEN):
    return await HttpFetcher(limits).get(url, "messages.[0].content.[1]", lambda *_: None)


async def refused(url, limits=OPEN):
    with pytest.raises(MediaError) as caught:
        await fetch(url, limits)
    assert caught.value.message.startswith("messages.[0].content.[1]: ")
    assert caught.value.status == 400
    return caught.value.message


@in_loop
async def test_a_picture_arrives():
    async with site(a=answer(png(), Content_Type="image/png")) as pages:
        assert await fetch(f"{pages.url}/a?b=c") == png()
        assert f"Host: localhost:{pages.port}" in pages.heads[0]
        assert "/a?b=c" in pages.heads[0]


@in_loop
async def test_failures_of_the_other_side_are_told_apart():
    async with site(
        missing=answer(b"no", "404 Not Found"),
        forbidden=answer(b"no", "403 Forbidden"),
        broken=answer(b"no", "500 Oops"),
        page=answer(b"<html>", Content_Type="text/html; charset=utf-8"),
        empty=answer(b""),
        packed=answer(b"x", Content_Encoding="gzip"),
        nonsense=b"not http\r\n\r\n",
        cut=answer(b"x" * 100)[:-50],
    ) as pages:
        for path, said in (
            ("missing", "404"),
            ("forbidden", "403"),
            ("broken", "500"),
            ("page", "web page"),
            ("empty", "nothing"),
            ("packed", "compressed"),
            ("nonsense", "cannot be read"),
            ("cut", "cannot be read"),
        ):
            assert said in await refused(f"{pages.url}/{path}")
        assert len(pages.heads) == 8  # nothing is asked for twice
    assert "cannot be read" in await refused(f"http://127.0.0.1:{free_port()}/")
    for url in ("http://", "http://a:b@localhost/", "http://[::1", "http://a b/"):
        await refused(url)


@in_loop
async def test_an_unknown_host_is_the_clients_error(monkeypatch):
    answers(monkeypatch, socket.gaierror(-2, "unknown"))
    assert "unknown" in await refused("http://nowhere.example/a", CLOSED)


async def silence(_writer):
    await asyncio.sleep(30)


async def stall(writer):
    writer.write(answer(b"x" * 1000)[:-900])
    await writer.drain()
    await asyncio.sleep(30)


async def trickle(writer):
    writer.write(answer(b"x" * 1000)[:-1000])
    for _ in range(50):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("script", [silence, stall, trickle])
@in_loop
async def test_a_slow_host_times_out_as_a_whole(script):
    async with site(a=script) as pages:
        start_s = time.monotonic()
        message = await refused(f"{pages.url}/a", HASTY)
        assert "timed out after 0.5 s" in message
        assert time.monotonic() - start_s < 1.5


@in_loop
async def test_a_host_within_the_limit_is_waited_for():
    async def late(writer):
        await asyncio.sleep(0.2)
        writer.write(answer(b"x"))

    async with site(a=late) as pages:
        start_s = time.monotonic()
        assert await fetch(f"{pages.url}/a") == b"x"
        assert time.monotonic() - start_s > 0.2


@in_loop
async def test_size_is_limited_by_the_header_and_while_it_arrives():
    async def unsized(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(100):
            writer.write(b"x" * 1000)
            await writer.drain()

    async with site(a=answer(b"x" * 10_001), b=unsized) as pages:
        for path in "ab":
            with pytest.raises(MediaTooLargeError, match="10000 bytes"):
                await fetch(f"{pages.url}/{path}")


@in_loop
async def test_redirects_are_followed_a_few_times():
    async with site(
        a=answer(status="302 Found", Location="/b"),
        b=answer(status="307 Temporary Redirect", Location="c"),
        c=answer(b"x"),
        loop=answer(status="302 Found", Location="/loop"),
        file=answer(status="302 Found", Location="file:///etc/passwd"),
    ) as pages:
        assert await fetch(f"{pages.url}/a") == b"x"
        assert "redirects" in await refused(f"{pages.url}/loop")
        assert len(pages.heads) == 3 + 4
        assert "http(s)" in await refused(f"{pages.url}/file")


def answers(monkeypatch, *results):
    """Makes the resolver give one result after the other; the last one again and again."""
    asked = []

    async def getaddrinfo(_loop, host, port, **_):
        asked.append(host)
        result = results[min(len(asked), len(results)) - 1]
        if isinstance(result, Exception):
            raise result
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in result]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/a",
        "http://localhost:{port}/a",
        "http://127.1:{port}/a",
        "http://2130706433:{port}/a",
        "http://0x7f000001:{port}/a",
        "http://0.0.0.0:{port}/a",
        "http://[::1]:{port}/a",
        "http://[::ffff:127.0.0.1]:{port}/a",
    ],
)
@in_loop
async def test_addresses_of_this_machine_are_refused_in_every_spelling(url):
    async with site(a=answer(b"x")) as pages:
        message = await refused(url.format(port=pages.port), CLOSED)
        assert "not public" in message
        assert "127.0.0.1" not in message
        assert pages.heads == []


@in_loop
async def test_one_private_address_among_public_ones_is_enough(monkeypatch):
    answers(monkeypatch, ["93.184.216.34", "10.0.0.1"])
    assert "not public" in await refused("http://mixed.example/a", CLOSED)


@in_loop
async def test_a_redirect_to_this_machine_is_refused(monkeypatch):
    """The first hop is allowed; the second is checked as strictly."""
    async with site(
        a=answer(status="302 Found", Location="http://inner.example/b"), b=answer(b"secret")
    ) as pages:
        answers(monkeypatch, ["127.0.0.1"], ["10.0.0.1"])
        monkeypatch.setattr(
            "tpu_vl.server.http_fetch.is_public", lambda a: a == ipaddress.ip_address("127.0.0.1")
        )
        assert "not public" in await refused(f"http://outer.example:{pages.port}/a", CLOSED)
        assert len(pages.heads) == 1


@in_loop
async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """A resolver that changes its answer is asked once, and its second answer never used."""
    async with site(a=answer(b"x")) as pages:
        asked = answers(monkeypatch, ["93.184.216.34"], ["127.0.0.1"])
        connected = []

        async def connect(_self, host, **_):
            connected.append(host)
            raise OSError("no network here")

        monkeypatch.setattr("httpcore._backends.auto.AutoBackend.connect_tcp", connect)
        await refused_by_network(f"http://rebind.example:{pages.port}/a")
        assert asked == ["rebind.example"]
        assert connected == ["93.184.216.34"]
        assert pages.heads == []


async def refused_by_network(url):
    with pytest.raises((MediaError, OSError)):
        await fetch(url, CLOSED)


@in_loop
async def test_the_name_is_kept_for_tls():
    sent = {}

    class Client:
        def build_request(self, _method, url, **fields):
            sent.update(fields, url=url)
            return "request"

        async def send(self, _request, **_):
            raise TimeoutError

    fetcher = HttpFetcher(OPEN)
    url = "https://localhost:444/a"
    with pytest.raises(TimeoutError):
        await fetcher._request(Client(), httpx.URL(url), "p", lambda *_: None)  # pyright: ignore
    assert sent["url"].host in ("127.0.0.1", "::1")
    assert sent["headers"]["Host"] == "localhost:444"
    assert sent["extensions"] == {"sni_hostname": "localhost"}


@in_loop
async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    async with site(a=answer(b"x")) as pages:
        assert await fetch(f"{pages.url}/a") == b"x"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "168.63.129.16",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "198.18.0.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "fd00:ec2::254",
        "fec0::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:53aa:64c:0:0:f5ff:fffe",
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_addresses_that_are_public(address):
    assert is_public(ipaddress.ip_address(address))
