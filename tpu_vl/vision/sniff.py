"""What a file is by its first bytes, never by the label that came with it."""

from typing import Literal

from tpu_vl.errors import MediaError
from tpu_vl.types import MediaKind

IMAGE_FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF", "AVIF")
VIDEO_FORMATS = ("MP4", "MOV", "WebM", "MKV", "AVI", "GIF")

Container = Literal["mov", "matroska", "avi", "gif"]

_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_MOV_BOXES = {b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"}
_EBML = b"\x1a\x45\xdf\xa3"


def identify(data: bytes) -> str | None:
    """Names a file's format by its magic bytes; None where it is none that is known.

    Args:
        data: the whole file, or at least its first kilobyte.

    Returns:
        A name of `IMAGE_FORMATS`, "MP4" (MOV among it), "MKV" (WebM among it), "AVI", or one of
        "HEIC", "SVG", "HTML", "PDF", which are known only to be refused by name.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    if data.startswith(b"BM") and data[14:18] in (
        b"\x0c\0\0\0",
        b"(\0\0\0",
        b"l\0\0\0",
        b"|\0\0\0",
    ):
        return "BMP"
    if data.startswith(b"RIFF"):
        return {b"WEBP": "WebP", b"AVI ": "AVI"}.get(data[8:12])
    if data.startswith(_EBML):
        return "MKV"
    if data[4:8] == b"ftyp":
        return _iso_brand(data)
    if data[4:8] in _MOV_BOXES:
        return "MP4"
    return _text_format(data)


def _iso_brand(data: bytes) -> str:
    size = int.from_bytes(data[:4], "big")
    box = data[8 : max(16, min(size, 1024))]
    brands = {box[i : i + 4] for i in (0, *range(8, len(box) - 3, 4))}
    if brands & {b"avif", b"avis"}:
        return "AVIF"
    return "HEIC" if brands & _HEIF_BRANDS else "MP4"


def _text_format(data: bytes) -> str | None:
    head = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if head.startswith(b"%pdf"):
        return "PDF"
    if head.startswith(b"<svg") or (head.startswith((b"<?xml", b"<!")) and b"<svg" in head):
        return "SVG"
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    return None


def image_format(data: bytes, *, param: str) -> str:
    """The format of a picture, one of `IMAGE_FORMATS`.

    Args:
        data: the file.
        param: path of the part in the request.

    Raises:
        MediaError: the file is no picture that is served; the message says what to send.
    """
    name = identify(data)
    if name in IMAGE_FORMATS:
        return name
    if name in ("MP4", "MKV", "AVI"):
        raise media_error(param, f"this is a video ({name}): send it as video_url")
    raise _refused(data, name, "image", IMAGE_FORMATS, param)


def video_container(data: bytes, *, param: str) -> Container:
    """The demuxer that reads a video file.

    The demuxer is named rather than probed, so that no playlist or script format, which could
    name other addresses, is ever opened.

    Args:
        data: the file.
        param: path of the part in the request.

    Raises:
        MediaError: the file is no video that is served; the message says what to send.
    """
    name = identify(data)
    containers: dict[str | None, Container] = {
        "MP4": "mov",
        "MKV": "matroska",
        "AVI": "avi",
        "GIF": "gif",
    }
    if name in containers:
        return containers[name]
    if name in IMAGE_FORMATS:
        raise media_error(param, f"this is an image ({name}): send it as image_url")
    raise _refused(data, name, "video", VIDEO_FORMATS, param)


def _refused(
    data: bytes, name: str | None, kind: MediaKind, accepted: tuple[str, ...], param: str
) -> MediaError:
    formats = ", ".join(accepted)
    if not data:
        return media_error(param, f"the {kind} is empty (0 bytes)")
    if name == "HTML":
        reason = f"this is an HTML page, not a {kind} file: give the file's own address"
    elif name is not None:
        reason = f"{name} is not supported: convert it to one of {formats}"
    else:
        reason = f"the file is none of {formats}"
    return media_error(param, reason)


def missing_bytes(data: bytes, container: Container) -> int:
    """Bytes that a video file's own headers declare beyond its end; 0 where none are missing.

    Args:
        data: the file.
        container: as told by `video_container`.
    """
    declared = {"mov": _mov_size, "matroska": _matroska_size, "avi": _avi_size, "gif": _gif_size}
    return max(0, declared[container](data) - len(data))


def _mov_size(data: bytes) -> int:
    end = 0
    while end + 8 <= len(data):
        size = int.from_bytes(data[end : end + 4], "big")
        if size == 1:
            size = int.from_bytes(data[end + 8 : end + 16], "big")
        if size < 8:  # 0: the box reaches the end of the file
            return len(data)
        end += size
    return end


def _matroska_size(data: bytes) -> int:
    body, size = _ebml_size(data, 4)
    segment = body + size
    if data[segment : segment + 4] != b"\x18\x53\x80\x67":
        return len(data)
    body, size = _ebml_size(data, segment + 4)
    return body + size


def _ebml_size(data: bytes, at: int) -> tuple[int, int]:
    """Where an element's body starts, and its length (0 for a live stream's unknown length)."""
    if at >= len(data) or data[at] == 0:
        return at, 0
    width = 9 - data[at].bit_length()
    mask = (1 << 7 * width) - 1
    size = int.from_bytes(data[at : at + width], "big") & mask
    return at + width, 0 if size == mask else size


def _avi_size(data: bytes) -> int:
    return 8 + int.from_bytes(data[4:8], "little")


def _gif_size(data: bytes) -> int:
    """Length up to the trailer byte, or one more than there is where blocks end without it."""

    def colours(flags: int) -> int:
        return 3 << (flags & 7) + 1 if flags & 0x80 else 0

    def after_blocks(at: int) -> int:
        while at < len(data) and data[at]:
            at += data[at] + 1
        return at + 1

    at = 13 + colours(data[10]) if len(data) > 10 else len(data)
    while at < len(data):
        if data[at] == 0x2C and at + 9 < len(data):
            at = after_blocks(at + 11 + colours(data[at + 9]))
        elif data[at] == 0x21:
            at = after_blocks(at + 2)
        else:  # the trailer, or garbage that decoders skip
            return at + 1
    return at + 1


def media_error(param: str, reason: str) -> MediaError:
    """A MediaError whose message starts with the part of the request at fault."""
    return MediaError(f"{param}: {reason}", param=param)
