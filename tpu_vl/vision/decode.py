"""Encoded pictures to RGB arrays, within limits that are checked before a pixel is allocated."""

import io

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from tpu_vl.config import MediaLimits
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.vision.resize import check_aspect
from tpu_vl.vision.sniff import image_format, media_error

# The plugin classes themselves: `Image.open` adds a process-wide pixel limit to the one here.
_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}
_ORIENTATION_TAG = 0x0112
# EXIF orientation -> (transpose, then mirror columns, mirror rows)
_ORIENTATIONS = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


def decode_image(data: bytes, limits: MediaLimits, *, param: str) -> np.ndarray:
    """Decodes a picture as a viewer shows it: upright, opaque, 8-bit RGB.

    Args:
        data: a PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF file; the first frame where it has several.
        limits: `max_bytes` and `max_pixels` apply.
        param: path of the part in the request, for error messages.

    Returns:
        uint8 [height, width, 3]. Orientation is applied, alpha is composited over white, 16-bit,
        32-bit and float grey are scaled (see `docs/vision.md`).

    Raises:
        MediaError: the file is not such a picture, is damaged or cut off, or has sides in a ratio
            over 200.
        MediaTooLargeError: over a limit.
    """
    return load_rgb(open_image(data, limits, param=param), param=param)


def open_image(data: bytes, limits: MediaLimits, *, param: str) -> ImageFile.ImageFile:
    """Reads a picture's header and checks its size; no pixel is decoded.

    Args:
        data, limits, param: as for `decode_image`.

    Returns:
        The opened picture. `size` may still be transposed by its orientation.

    Raises:
        MediaError, MediaTooLargeError: as for `decode_image`.
    """
    if len(data) > limits.max_bytes:
        raise MediaTooLargeError(
            f"{param}: the image has {len(data)} bytes, over the limit of {limits.max_bytes}",
            param=param,
        )
    name = image_format(data, param=param)
    if name == "WebP":  # its decoder allocates the canvas when it is made
        _check_size(*_webp_size(data), limits, param=param)
    try:
        image = _PLUGINS[name](io.BytesIO(data))
    except Exception as error:
        raise _damaged(error, name, param) from None
    _check_size(image.height, image.width, limits, param=param)
    return image


def load_rgb(image: ImageFile.ImageFile, *, param: str) -> np.ndarray:
    """Decodes an opened picture; see `decode_image`.

    Args:
        image: from `open_image`.
        param: path of the part in the request.

    Raises:
        MediaError: the pixels are damaged or cut off.
    """
    try:
        image.load()
        rgb = _rgb8(image)
    except Exception as error:
        raise _damaged(error, image.format or "image", param) from None
    return orient(rgb, *_ORIENTATIONS[_orientation(image)])


def orient(
    rgb_HWC: np.ndarray, transpose: bool, mirror_columns: bool, mirror_rows: bool
) -> np.ndarray:
    """Turns a picture by one of the eight symmetries of a rectangle.

    Args:
        rgb_HWC: any dtype.
        transpose: swap rows and columns first.
        mirror_columns, mirror_rows: then reverse left and right, top and bottom.

    Returns:
        A C-contiguous array.
    """
    if transpose:
        rgb_HWC = rgb_HWC.transpose(1, 0, 2)
    step_h, step_w = (-1 if mirror_rows else 1), (-1 if mirror_columns else 1)
    return np.ascontiguousarray(rgb_HWC[::step_h, ::step_w])


def over_white(rgba_HWC: np.ndarray) -> np.ndarray:
    """Composites uint8 RGBA over white: uint8 RGB."""
    image = Image.fromarray(rgba_HWC)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"))


def _check_size(height: int, width: int, limits: MediaLimits, *, param: str) -> None:
    if height * width > limits.max_pixels:
        raise MediaTooLargeError(
            f"{param}: the image has {width} x {height} pixels, over the limit of "
            f"{limits.max_pixels} pixels; send a smaller one",
            param=param,
        )
    check_aspect(height, width, param=param)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Height and width in a WebP header; (1, 1) where there is none, which decoding refuses."""
    chunk = data[12:16]
    if chunk == b"VP8X" and len(data) >= 30:
        width, height = (int.from_bytes(data[i : i + 3], "little") for i in (24, 27))
        return height + 1, width + 1
    if chunk == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8 " and len(data) >= 30:
        width, height = (int.from_bytes(data[i : i + 2], "little") & 0x3FFF for i in (26, 28))
        return max(height, 1), max(width, 1)
    return 1, 1


def _damaged(error: Exception, name: str, param: str) -> MediaError:
    """The library's text stays out: it can quote the data."""
    if isinstance(error, Image.DecompressionBombError):
        return media_error(param, f"the {name} image declares more pixels than are decoded")
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return media_error(param, f"the {name} image is truncated: its end is missing")
    return media_error(param, f"the {name} image is damaged and cannot be decoded")


def _orientation(image: ImageFile.ImageFile) -> int:
    # Read after loading: a PNG may carry the tag behind its pixels, and a TIFF is turned by load.
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # malformed metadata is no reason to refuse the picture
        return 1
    return value if isinstance(value, int) and value in _ORIENTATIONS else 1


def _rgb8(image: ImageFile.ImageFile) -> np.ndarray:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        grey = _grey8(np.asarray(image))
        if image.mode != "F" and isinstance(key := image.info.get("transparency"), int):
            grey = np.where(np.asarray(image) == key, np.uint8(255), grey)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.has_transparency_data:
        return over_white(np.asarray(image.convert("RGBA")))
    return np.asarray(image.convert("RGB"))


def _grey8(values_HW: np.ndarray) -> np.ndarray:
    """Scales deep grey to 8 bits: by its range class, else from its minimum to its maximum."""
    values = np.nan_to_num(values_HW.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    classes = (1.0, 255.0, 65_535.0) if values_HW.dtype.kind == "f" else (65_535.0,)
    top = next((top for top in classes if low >= 0 and high <= top), None)
    if top is not None:
        low, high = 0.0, top
    return np.rint((values - low) * (255.0 / (high - low))).astype(np.uint8)
