"""Pictures of every accepted kind decode to what a viewer shows; all others fail by name."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from tests.vision.synth import LIMITS, PARAM, data, encode
from tpu_vl.config import MediaLimits
from tpu_vl.errors import MediaError, MediaTooLargeError
from tpu_vl.vision.decode import decode_image, open_image

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def decode(file: bytes, limits: MediaLimits = LIMITS) -> np.ndarray:
    rgb = decode_image(file, limits, param=PARAM)
    assert rgb.dtype == np.uint8
    assert rgb.ndim == 3
    assert rgb.shape[2] == 3
    assert rgb.flags.c_contiguous
    return rgb


def refused(file: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(MediaError) as caught:
        decode_image(file, limits, param=PARAM)
    error = caught.value
    assert error.param == PARAM
    assert error.status == 400
    assert error.message.startswith(PARAM)
    assert "\n" not in error.message
    assert "Traceback" not in error.message
    assert "BytesIO" not in error.message
    assert len(error.message) < 300
    return error.message


def near(pixel: np.ndarray, colour: tuple[int, int, int], tolerance: int = 12) -> bool:
    return bool(np.all(np.abs(pixel.astype(int) - colour) <= tolerance))


def picture(height: int = 48, width: int = 64) -> np.ndarray:
    rng = np.random.default_rng(7)
    coarse = rng.integers(0, 256, (6, 8, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height)))


@pytest.mark.parametrize("fmt", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG", "AVIF"])
def test_format(fmt: str) -> None:
    options = {"lossless": True} if fmt == "WEBP" else {"quality": 95} if fmt != "GIF" else {}
    difference = np.abs(decode(encode(picture(), fmt, **options)).astype(int) - picture())
    assert difference.mean() <= (0 if fmt in ("PNG", "BMP", "TIFF", "WEBP") else 8)


def test_camera_jpeg_is_upright() -> None:
    rgb = decode(data("exif6.jpg"))
    assert rgb.shape == (64, 48, 3)
    assert near(rgb[5, 24], RED)
    assert near(rgb[60, 24], GREEN)
    assert decode(data("exif6_640x480.jpg")).shape == (640, 480, 3)


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_every_orientation_in_every_format(tag: int, fmt: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = tag
    image = Image.fromarray(picture())
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    expected = np.asarray(image.transpose(turned[tag]) if tag > 1 else image).astype(int)
    rgb = decode(encode(image, fmt, exif=exif, quality=95))
    assert rgb.shape == expected.shape
    assert np.abs(rgb - expected).mean() < 6


@pytest.mark.parametrize("tag", range(1, 9))
def test_public_orientation_files_agree(tag: int) -> None:
    with Image.open(io.BytesIO(data(f"exif{tag}.jpg"))) as image:
        stored = np.asarray(image)
    rows, columns, _ = decode(data(f"exif{tag}.jpg")).shape
    assert (rows, columns) == (stored.shape[:2] if tag < 5 else stored.shape[1::-1])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_orientation_counts_as_upright() -> None:
    file = data("exif6.jpg")
    at = file.index(b"II*\0") if b"II*\0" in file else file.index(b"MM\0*")
    order = "<" if file[at : at + 2] == b"II" else ">"
    past_the_end = file[: at + 4] + struct.pack(order + "I", 1 << 20) + file[at + 8 :]
    nine = Image.Exif()
    nine[0x0112] = 9
    for broken in (past_the_end, encode(picture(), "JPEG", exif=nine)):
        assert decode(broken).shape == (48, 64, 3)


@pytest.mark.parametrize("name", ["alpha_hidden_noise.png", "alpha_hidden_noise.webp"])
def test_alpha_is_composited_over_white(name: str) -> None:
    rgb = decode(data(name))
    assert tuple(rgb[0, 0]) == WHITE
    assert rgb[:16, :16].std() == 0
    assert tuple(rgb[32, 32]) == (0, 0, 0)


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "TIFF"])
def test_half_transparent_red(fmt: str) -> None:
    rgba = np.zeros((16, 16, 4), np.uint8)
    rgba[...] = (255, 0, 0, 128)
    options = {"lossless": True} if fmt == "WEBP" else {}
    assert near(decode(encode(rgba, fmt, **options))[3, 3], (255, 127, 127), 1)


@pytest.mark.parametrize("name", ["palette_trns.png", "la.png"])
def test_palette_and_grey_alpha_have_white_corners(name: str) -> None:
    assert tuple(decode(data(name))[0, 0]) == WHITE


def test_transparent_colour_keys() -> None:
    grey = Image.fromarray(np.full((4, 4), 9, np.uint8))
    rgb = Image.fromarray(np.full((4, 4, 3), 9, np.uint8))
    deep = Image.fromarray(np.full((4, 4), 300, np.uint16))
    for file in (
        encode(grey, transparency=9),
        encode(rgb, transparency=(9, 9, 9)),
        encode(deep, transparency=300),
    ):
        assert tuple(decode(file)[1, 1]) == WHITE
    assert tuple(decode(encode(grey, transparency=8))[1, 1]) == (9, 9, 9)


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_sixteen_bit_colour_with_alpha() -> None:
    opaque, hidden = struct.pack(">4H", 65_535, 32_896, 0, 65_535), struct.pack(">4H", 9, 9, 9, 0)
    rgb = decode(png(2, 1, 16, 6, b"\0" + opaque + hidden))
    assert near(rgb[0, 0], (255, 128, 0), 1)
    assert tuple(rgb[0, 1]) == WHITE
    grey_alpha = decode(png(2, 1, 16, 4, b"\0" + struct.pack(">4H", 32_896, 65_535, 5, 0)))
    assert near(grey_alpha[0, 0], (128, 128, 128), 1)
    assert tuple(grey_alpha[0, 1]) == WHITE


RAMP = np.tile(np.arange(256, dtype=np.uint16) * 257, (4, 1))


@pytest.mark.parametrize(
    "file",
    [
        data("gray16_ramp.png"),
        encode(RAMP),
        encode(RAMP, "TIFF"),
        encode(RAMP.astype(np.int32), "TIFF"),
        encode(RAMP.astype(np.float32), "TIFF"),
        encode(RAMP.astype(np.float32) / 65_535, "TIFF"),
        encode(RAMP.astype(np.float32) / 257, "TIFF"),
    ],
    ids=["public", "png", "I;16", "I", "F 65535", "F 1", "F 255"],
)
def test_deep_grey_is_scaled(file: bytes) -> None:
    rgb = decode(file)
    assert len(np.unique(rgb)) == 256
    assert np.sum(np.all(rgb[:, :, 0] == 255, axis=0)) == 1
    assert np.array_equal(rgb[0, :, 0], np.arange(256))


def test_big_endian_sixteen_bit_tiff() -> None:
    little = encode(RAMP, "TIFF")
    big = Image.frombytes("I;16B", (256, 4), RAMP.astype(">u2").tobytes())
    assert np.array_equal(decode(encode(big, "TIFF")), decode(little))


def test_wide_ranges_are_stretched_not_clipped() -> None:
    wide = np.array([[-1.0e6, 0.0, 1.0e6, np.nan]], np.float32)
    assert decode(encode(wide, "TIFF"))[0, :, 0].tolist() == [0, 128, 255, 128]


def test_grey_equals_its_rgb_copy() -> None:
    grey = decode(data("gray8.png"))
    assert np.array_equal(grey, decode(encode(np.full((64, 64, 3), 77, np.uint8))))


def test_one_bit() -> None:
    bits = Image.fromarray(np.eye(8, dtype=np.uint8) * 255).convert("1")
    for fmt in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(decode(encode(bits, fmt))[..., 0], np.eye(8) * 255)


def test_cmyk() -> None:
    assert near(decode(data("cmyk_red.jpg"))[5, 5], RED, 20)
    plain = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert near(decode(encode(plain, "TIFF"))[3, 3], RED, 2)
    assert near(decode(encode(plain, "JPEG", quality=95))[3, 3], RED, 4)


@pytest.mark.parametrize("name", ["anim3.gif", "anim3.webp"])
def test_animation_gives_its_first_frame(name: str) -> None:
    rgb = decode(data(name))
    assert rgb.shape == (64, 64, 3)
    assert np.all(np.abs(rgb.astype(int) - RED) <= (0 if name.endswith("gif") else 3))


@pytest.mark.parametrize("name", ["trunc.jpg", "trunc.png"])
def test_truncated_public_files(name: str) -> None:
    assert "truncated" in refused(data(name))


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_truncated_anywhere(fmt: str) -> None:
    rng = np.random.default_rng(3)
    file = encode(rng.integers(0, 256, (64, 64, 3), np.uint8), fmt)
    for share in (0.02, 0.3, 0.6, 0.9):
        refused(file[: int(len(file) * share)])


def test_garbage() -> None:
    assert "none of" in refused(np.random.default_rng(0).bytes(200))
    assert "empty" in refused(b"")
    file = bytearray(encode(picture()))
    file[29] ^= 0xFF  # the CRC of IHDR
    assert "damaged" in refused(bytes(file))


def test_formats_refused_by_name() -> None:
    assert "HEIC is not supported" in refused(data("fake.heic"))
    assert "video_url" in refused(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(64))
    assert "video_url" in refused(b"\x1a\x45\xdf\xa3" + bytes(64))
    assert "HTML" in refused(b"\n <!DOCTYPE html><html><body>404</body></html>")
    assert "PDF" in refused(b"%PDF-1.7 ...")


def test_svg_is_refused_and_never_fetched() -> None:
    assert "SVG is not supported" in refused(data("x.svg"))
    entity = b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg/>'
    assert "SVG is not supported" in refused(entity)


def test_avif_brand() -> None:
    file = encode(picture(), "AVIF")
    assert file[8:12] == b"avif"
    assert decode(file).shape == (48, 64, 3)


def test_bomb_is_refused_from_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("pixels were decoded"))
    message = refused(data("bomb_20000.png"))
    assert "20000 x 20000" in message
    assert str(LIMITS.max_pixels) in message


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_pixel_limit_in_every_format(fmt: str) -> None:
    file = encode(picture(), fmt)
    assert decode(file, MediaLimits(max_pixels=48 * 64)).shape == (48, 64, 3)
    with pytest.raises(MediaTooLargeError, match="64 x 48 pixels"):
        decode_image(file, MediaLimits(max_pixels=48 * 64 - 1), param=PARAM)


def test_webp_canvas_is_read_before_its_decoder_is_made() -> None:
    for options in ({"lossless": True}, {"quality": 50}, {"quality": 50, "exif": b"Exif\0\0MM\0*"}):
        file = encode(picture(), "WEBP", **options)
        broken = file[:40]  # no decoder can be made of this
        with pytest.raises(MediaTooLargeError, match="64 x 48 pixels"):
            decode_image(broken, MediaLimits(max_pixels=10), param=PARAM)


def test_byte_limit() -> None:
    file = encode(picture())
    assert decode(file, MediaLimits(max_bytes=len(file))).shape == (48, 64, 3)
    with pytest.raises(MediaTooLargeError, match=str(len(file) - 1)):
        decode_image(file, MediaLimits(max_bytes=len(file) - 1), param=PARAM)


def test_limits_over_pillows_own_are_honoured() -> None:
    file = png(20_000, 9_500, 1, 0, (b"\0" + bytes(2_500)) * 9_500)
    with pytest.raises(MediaTooLargeError, match="20000 x 9500"):
        decode_image(file, LIMITS, param=PARAM)
    assert Image.MAX_IMAGE_PIXELS is not None
    assert 2 * Image.MAX_IMAGE_PIXELS < 190_000_000  # Image.open itself would refuse it
    assert open_image(file, MediaLimits(max_pixels=1 << 30), param=PARAM).size == (20_000, 9_500)


@pytest.mark.parametrize("size", [(4_000, 1), (1, 4_000), (201, 1)])
def test_too_thin(size: tuple[int, int]) -> None:
    assert "200 times" in refused(encode(np.zeros((*size, 3), np.uint8)))


def test_ratio_of_exactly_200_is_accepted() -> None:
    assert decode(data("s_28x5600.png")).shape in ((5_600, 28, 3), (28, 5_600, 3))


@pytest.mark.filterwarnings("ignore")  # Pillow's, about damaged metadata
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_never_escapes_as_another_error(data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]))
    file = bytearray(encode(picture(24, 32), fmt))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MediaError):
        decode(bytes(file), MediaLimits(max_pixels=1_000_000))
