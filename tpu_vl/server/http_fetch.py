"""Downloads for a client: the address is checked once, and that same address is connected to."""

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Callable

import httpx

from tpu_vl.config import MediaLimits
from tpu_vl.errors import MediaError, MediaTooLargeError

_MAX_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Addresses that count as global but answer for the machine: Azure's host service.
_HOST_SERVICES = frozenset({ipaddress.ip_address("168.63.129.16")})

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class HttpFetcher:
    """Fetches http(s) addresses that a client named.

    Names are resolved once per hop, every answer is checked, and the connection goes to a checked
    address with the name kept in Host and SNI, so a second answer of the resolver changes nothing.
    Redirects are followed by hand under the same check; proxies of the environment are not used;
    nothing is retried, except that the next address of a name is tried when connecting fails.

    Args:
        limits: `max_bytes`, `fetch_timeout_s`, `allow_private_addresses`.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._tls = _tls_context()

    async def get(self, url: str, param: str, count: Callable[[int, str], None]) -> bytes:
        """The body of a 200 answer.

        Args:
            url: http or https.
            param: the part of the request, for messages.
            count: told the size of each chunk that arrives; may raise.

        Raises:
            MediaError: refused address, no answer in time, a status other than 200, a web page.
            MediaTooLargeError: over `max_bytes`.
        """
        timeout_s = self._limits.fetch_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._follow(url, param, count)
        except TimeoutError:
            raise MediaError(
                f"{param}: fetching the URL timed out after {timeout_s:g} s "
                "(--media-fetch-timeout-s)",
                param=param,
            ) from None

    async def _follow(self, url: str, param: str, count: Callable[[int, str], None]) -> bytes:
        target = _parse(url, param)
        # Connections are not kept: one opened for another name must not serve this one.
        pool = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            verify=self._tls, trust_env=False, follow_redirects=False, limits=pool, timeout=None
        ) as client:
            for _ in range(_MAX_REDIRECTS + 1):
                answer = await self._request(client, target, param, count)
                if isinstance(answer, bytes):
                    return answer
                target = _parse(str(target.join(answer)), param)
        raise MediaError(f"{param}: more than {_MAX_REDIRECTS} redirects", param=param)

    async def _request(
        self,
        client: httpx.AsyncClient,
        target: httpx.URL,
        param: str,
        count: Callable[[int, str], None],
    ) -> bytes | httpx.URL:
        """The body, or where the answer redirects to."""
        failure: Exception | None = None
        for address in await self._resolve(target, param):
            request = client.build_request(
                "GET",
                target.copy_with(host=str(address)),
                headers={
                    "Host": target.netloc.decode("ascii"),
                    "Accept": "image/*, video/*, application/octet-stream;q=0.9",
                    "Accept-Encoding": "identity",
                    "User-Agent": "tpu-vl",
                },
                extensions={"sni_hostname": target.raw_host.decode("ascii")},
            )
            try:
                response = await client.send(request, stream=True)
            except httpx.ConnectError as error:
                failure = error
                continue
            except httpx.HTTPError as error:
                failure = error
                break
            try:
                return await self._read(response, param, count)
            except httpx.HTTPError as error:
                failure = error
                break
            finally:
                await response.aclose()
        raise MediaError(
            f"{param}: the server of the URL cannot be read ({type(failure).__name__})", param=param
        )

    async def _read(
        self, response: httpx.Response, param: str, count: Callable[[int, str], None]
    ) -> bytes | httpx.URL:
        if response.is_redirect and "location" in response.headers:
            try:
                return httpx.URL(response.headers["location"])
            except httpx.InvalidURL:
                raise MediaError(f"{param}: the URL redirects nowhere", param=param) from None
        if response.status_code != 200:
            raise MediaError(
                f"{param}: the server of the URL answered {response.status_code}", param=param
            )
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type in ("text/html", "application/xhtml+xml"):
            raise MediaError(
                f"{param}: the server of the URL answered 200 with a web page ({media_type}), not "
                "with an image or a video",
                param=param,
            )
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise MediaError(f"{param}: the server of the URL compressed its answer", param=param)
        length = response.headers.get("content-length", "0")
        check_size(int(length) if length.isdecimal() else 0, self._limits, param)
        data = bytearray()
        async for chunk in response.aiter_raw():
            count(len(chunk), param)
            data += chunk
            check_size(len(data), self._limits, param)
        if not data:
            raise MediaError(f"{param}: the server of the URL answered with nothing", param=param)
        return bytes(data)

    async def _resolve(self, target: httpx.URL, param: str) -> list[IPAddress]:
        """Addresses of the host, all of them allowed."""
        port = target.port or {"http": 80, "https": 443}[target.scheme]
        host = target.raw_host.decode("ascii")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError):
            raise MediaError(f"{param}: the host name of the URL is unknown", param=param) from None
        addresses = list(dict.fromkeys(ipaddress.ip_address(info[4][0]) for info in found))
        if not self._limits.allow_private_addresses and not all(map(is_public, addresses)):
            raise MediaError(
                f"{param}: the URL leads to an address that is not public; send a data: URL (the "
                "operator may set --allow-private-media-addresses)",
                param=param,
            )
        return addresses


def check_size(num_bytes: int, limits: MediaLimits, param: str) -> None:
    """Refuses a file over the limit of one file.

    Raises:
        MediaTooLargeError: with the limit.
    """
    if num_bytes > limits.max_bytes:
        raise MediaTooLargeError(
            f"{param}: the file is over the limit of {limits.max_bytes} bytes; send a smaller one "
            "or raise --max-media-mb",
            param=param,
        )


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """The trusted certificates: reading them takes long enough to hold up an event loop."""
    return httpx.create_ssl_context(trust_env=False)


def is_public(address: IPAddress) -> bool:
    """Whether an address is on the public internet, also when it is wrapped into IPv6."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and address not in _HOST_SERVICES
    )


def _parse(url: str, param: str) -> httpx.URL:
    """The one parse of an address: what is checked is what is connected to."""
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise MediaError(f"{param}: the URL is malformed", param=param) from None
    if target.scheme not in ("http", "https") or not target.host:
        raise MediaError(f"{param}: expected an http(s) or data: URL", param=param)
    if target.userinfo:
        raise MediaError(f"{param}: URLs with a user name are refused", param=param)
    return target
