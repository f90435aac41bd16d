"""Media of a request to bytes: data:, http(s) and file: addresses, each under limits."""

import asyncio
import base64
import binascii
import os
import stat
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from tpu_vl.config import MediaLimits
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.server.http_fetch import HttpFetcher, check_size
from tpu_vl.types import MediaPart

T = TypeVar("T")

# Media of one request that are fetched at once.
_AT_ONCE = 8


class ByteMeter:
    """Bytes that the media of one request may take in all, counted as they arrive.

    Args:
        limit_bytes: the server's limit of a request body: fetched media count like sent ones.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0

    def add(self, num_bytes: int, param: str) -> None:
        """Counts bytes.

        Raises:
            MediaTooLargeError: the request's media are over the limit.
        """
        self._used_bytes += num_bytes
        if self._used_bytes > self._limit_bytes:
            raise MediaTooLargeError(
                f"the media of the request are over {self._limit_bytes} bytes (at {param}); send "
                "fewer or smaller files, or raise --max-request-mb",
                param=param,
            )


class MediaFetcher:
    """Gets the files that a request names.

    Args:
        limits: sizes, times and what may be read.
        request_bytes: of all media of one request.
    """

    def __init__(self, limits: MediaLimits, request_bytes: int) -> None:
        self._limits = limits
        self._request_bytes = request_bytes
        self._http = HttpFetcher(limits)

    async def fetch(self, parts: Sequence[MediaPart]) -> list[list[bytes]]:
        """The files of each part, in order; more than one for a video given as frames.

        Raises:
            MediaError: an address cannot be read; names the part.
            MediaTooLargeError: a file, a frame list or the whole is over its limit.
        """
        meter = ByteMeter(self._request_bytes)
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(url: str, param: str) -> list[bytes]:
            async with slots:
                return await self._fetch_url(url, param, meter)

        for part in parts:
            self._check_frames(part)
        urls = [(url, _path(part, i)) for part in parts for i, url in enumerate(part.urls)]
        files = await gather_or_cancel(one(url, param) for url, param in urls)
        rest = iter(files)
        return [[data for _ in part.urls for data in next(rest)] for part in parts]

    def _check_frames(self, part: MediaPart) -> None:
        counts = [_count_frames(url) if part.kind == "video" else 1 for url in part.urls]
        if sum(counts) > self._limits.max_video_frames:
            raise MediaTooLargeError(
                f"{part.param} lists {sum(counts)} frames; the limit is "
                f"{self._limits.max_video_frames}: send fewer frames",
                param=part.param,
            )

    async def _fetch_url(self, url: str, param: str, meter: ByteMeter) -> list[bytes]:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(self._decode_data, url, param, meter)
        if scheme in ("http", "https"):
            return [await self._http.get(url, param, meter.add)]
        if scheme == "file":
            return [await asyncio.to_thread(self._read_file, url, param, meter)]
        raise MediaError(f"{param}: expected an http(s) or data: URL", param=param)

    def _decode_data(self, url: str, param: str, meter: ByteMeter) -> list[bytes]:
        head, comma, payload = url.partition(",")
        fields = [field.strip().lower() for field in head[len("data:") :].split(";")]
        if not comma:
            raise MediaError(
                f"{param}: the data: URL has no comma; expected data:<type>;base64,<data>",
                param=param,
            )
        if fields[-1] != "base64" or len(fields) < 2:
            raise MediaError(
                f"{param}: the data: URL is not base64; expected data:<type>;base64,<data>",
                param=param,
            )
        pieces = payload.split(",") if fields[0] == _FRAME_LIST else [payload]
        return [self._decode_base64(piece, param, meter) for piece in pieces]

    def _decode_base64(self, text: str, param: str, meter: ByteMeter) -> bytes:
        num_bytes = len(text) * 3 // 4
        check_size(num_bytes - 2, self._limits, param)
        meter.add(num_bytes, param)
        plain = unquote(text) if "%" in text else text
        packed = "".join(plain.split()).translate(_URL_SAFE).rstrip("=")
        try:
            data = base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise MediaError(f"{param}: the data: URL holds invalid base64", param=param) from None
        if not data:
            raise MediaError(f"{param}: the data: URL is empty", param=param)
        return data

    def _read_file(self, url: str, param: str, meter: ByteMeter) -> bytes:
        root = self._limits.allowed_local_media_path
        if root is None:
            raise MediaError(
                f"{param}: file: URLs are refused; send a data: URL (the operator may set "
                "--allowed-local-media-path)",
                param=param,
            )
        data = _read_inside(url, Path(root), self._limits.max_bytes)
        if data is None:
            # One text for every reason: a client must not learn what exists outside.
            raise MediaError(
                f"{param}: not a readable file inside --allowed-local-media-path", param=param
            )
        check_size(len(data), self._limits, param)
        meter.add(len(data), param)
        return data


_FRAME_LIST = "video/jpeg"
_URL_SAFE = str.maketrans("-_", "+/")


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all; when one fails, or the caller is cancelled, the others are cancelled first."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _path(part: MediaPart, index: int) -> str:
    return part.param if len(part.urls) == 1 else f"{part.param}.[{index}]"


def _count_frames(url: str) -> int:
    """Frames that a video address holds, by its commas, before anything is decoded."""
    if url[:5].lower() != "data:":
        return 1
    head = url[:256].partition(",")[0]
    is_list = head[len("data:") :].partition(";")[0].strip().lower() == _FRAME_LIST
    return url.count(",") if is_list else 1


def _read_inside(url: str, root: Path, max_bytes: int) -> bytes | None:
    """Reads a regular file below `root` after resolving symlinks; None for every other case."""
    try:
        address = urlsplit(url)
        path = os.path.realpath(unquote(address.path), strict=True)
        inside = Path(path).is_relative_to(os.path.realpath(root, strict=True))
        if address.netloc not in ("", "localhost") or address.query or not inside:
            return None
        # Not following a link, not waiting on a pipe: what was resolved is what is opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return file.read(max_bytes + 1)
    except (OSError, ValueError):
        return None
