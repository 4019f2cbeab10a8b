"""Pictures to tensors: as transformers' own processors make them, and within bounds."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from dormouse.errors import InvalidRequest
from dormouse.model.preprocessing import image_input
from dormouse.tasks.description import ImageInput
from dormouse.tasks.images import LIGHT_PIXELS, TooHeavy, pixels_of
from dormouse.tasks.scans import scans_in

LIMIT = 1_000_000


def picture(width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (9, 64)])
@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(size={"height": 16, "width": 24}, resample=2),
        ViTImageProcessorPil(
            size={"height": 16, "width": 16}, resample=3, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
        ),
        ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.875, resample=3),
    ],
)
def test_pictures_become_what_transformers_makes_of_them(processor: Any, size: tuple[int, int], tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    image = image_input("pixel_values", json.loads((tmp_path / "preprocessor_config.json").read_bytes()))
    assert image is not None
    expected = processor(picture(*size), return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(pixels_of(image, file_of(picture(*size)), LIMIT), expected, atol=1e-5)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"size": {"longest_edge": 3}},
        {"size": {"shortest_edge": 8}},
        {"size": 8, "do_resize": False},
        {"size": 8, "resample": 77},
        {"size": 8, "do_center_crop": True, "crop_size": 4},
        {"size": "wide"},
    ],
)
def test_what_is_not_understood_is_not_guessed(said: dict[str, Any]) -> None:
    assert image_input("x", said) is None


def test_descriptions_of_older_versions_are_understood() -> None:
    image = image_input("x", {"size": 8, "do_normalize": False})
    assert image is not None
    assert (image.height, image.width, image.mean, image.deviation) == (8, 8, (0, 0, 0), (1, 1, 1))
    cropped = image_input("x", {"size": {"shortest_edge": 10}, "do_center_crop": True, "crop_size": 8, "image_mean": 0})
    assert cropped is not None
    assert (cropped.shortest_edge, cropped.height, cropped.mean) == (10, 8, (0, 0, 0))


PLAIN = ImageInput("x", 4, 4)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_pictures_of_any_kind_have_three_colours(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert pixels_of(PLAIN, file_of(Image.new(mode, (5, 6)), kind), LIMIT).shape == (3, 4, 4)


def test_a_picture_that_lies_on_its_side_is_put_upright() -> None:
    lying = Image.new("RGB", (4, 4))
    lying.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright = pixels_of(PLAIN, file_of(lying, exif=exif), LIMIT)
    assert upright[0, 3, 3] == 1
    assert upright.sum() == 1


@pytest.mark.parametrize("level", [0, 300, 5_000, 20_000, 40_000, 65_535])
def test_gray_of_sixteen_bits_is_scaled_and_not_cut_off(level: int) -> None:
    file = file_of(Image.fromarray(np.full((5, 6), level, np.uint16)))
    with_alpha = png_of(1, 1, struct.pack(">HH", level, 9), depth=16, kind=4)
    np.testing.assert_allclose(pixels_of(PLAIN, file, LIMIT), level / 65_535, atol=1 / 500)
    np.testing.assert_allclose(pixels_of(PLAIN, with_alpha, LIMIT), level / 65_535, atol=1 / 255)


def png_of(width: int, height: int, row: bytes, *, depth: int, kind: int) -> bytes:
    """Rows all alike; ``kind`` is 0 for gray, 4 for gray with alpha."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    body = _chunk(b"IDAT", zlib.compress((b"\0" + row) * height))
    return b"\x89PNG\r\n\x1a\n" + head + body + _chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(65_501, 1), (1, 65_501)])
def test_lines_are_refused_before_they_are_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"the picture has {size[0]}x{size[1]} pixels, 65500 are the limit"):
        pixels_of(PLAIN, bomb(*size), LIMIT)


@pytest.mark.parametrize("count", [1, 99])
def test_jpegs_of_many_scans_are_read(count: int) -> None:
    assert scans_in(with_scans(count)) == count
    assert pixels_of(PLAIN, with_scans(count), LIMIT).shape == (3, 4, 4)


def test_jpegs_of_too_many_scans_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the picture has more than 100 scans; save it"):
        pixels_of(PLAIN, with_scans(20_000), LIMIT)


def test_what_looks_like_a_scan_inside_of_a_comment_is_none() -> None:
    said = file_of(picture(), "JPEG", comment=b"\xff\xda" * 500)
    assert scans_in(said) == 1
    assert scans_in(file_of(picture(), "JPEG", progressive=True)) == 10
    assert scans_in(said + with_scans(50)) == 1  # nobody reads beyond the end


def test_what_takes_a_while_is_told_by_its_head() -> None:
    with pytest.raises(TooHeavy):
        pixels_of(PLAIN, with_scans(17), LIMIT, light=True)
    with pytest.raises(TooHeavy):
        pixels_of(PLAIN, bomb(2_001, 2_000), 2 * LIGHT_PIXELS, light=True)
    assert pixels_of(PLAIN, with_scans(16), LIMIT, light=True).shape == (3, 4, 4)


def with_scans(count: int, side: int = 40) -> bytes:
    """A gray progressive JPEG: each scan after the first says of up to 32,767 blocks that they stay as they are."""

    def segment(marker: int, content: bytes) -> bytes:
        return b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content

    blocks = ((side + 7) // 8) ** 2
    code = bytes([1, *[0] * 15])  # one code of one bit
    head = segment(0xDB, b"\0" + b"\1" * 64) + segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    tables = segment(0xC4, b"\0" + code + b"\0") + segment(0xC4, b"\x10" + code + b"\xe0")
    bits = "0" + "1" * 14
    bits *= -(-blocks // 32_767)
    bits += "1" * (-len(bits) % 8)
    run = bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)).replace(b"\xff", b"\xff\0")
    first = segment(0xDA, b"\1\1\0\0\0\0") + bytes((blocks + 7) // 8)
    rest = segment(0xDA, b"\1\1\0\1\x3f\0") + run
    return b"\xff\xd8" + head + tables + first + rest * (count - 1) + b"\xff\xd9"


def bomb(width: int, height: int) -> bytes:
    """A PNG that says its size, and has next to nothing behind it."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(bytes(100)))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("size", [(1001, 1000), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_refused_before_they_are_decoded(size: tuple[int, int]) -> None:
    complaint = f"the picture has {size[0]}x{size[1]} pixels, {LIMIT} are the limit of this server"
    with pytest.raises(InvalidRequest, match=complaint):
        pixels_of(PLAIN, bomb(*size), LIMIT)


def test_a_line_does_not_become_a_giant() -> None:
    with pytest.raises(InvalidRequest, match="the picture has 224x2240000 pixels"):
        pixels_of(ImageInput("x", 224, 224, shortest_edge=224), file_of(Image.new("RGB", (1, 10_000))), LIMIT)


def test_what_is_no_picture_is_said_in_one_line() -> None:
    with pytest.raises(InvalidRequest, match=r"the picture cannot be read: it has no known format; send PNG, JPEG"):
        pixels_of(PLAIN, b"no picture", LIMIT)
    with pytest.raises(InvalidRequest, match="the picture cannot be read"):
        pixels_of(PLAIN, file_of(picture())[:200], LIMIT)


@given(st.binary(max_size=200), st.integers(0, 1500))
def test_damaged_pictures_are_read_or_refused(damage: bytes, at: int) -> None:
    file = file_of(picture(), "JPEG")
    damaged = file[:at] + damage + file[at + len(damage) :]
    try:
        assert pixels_of(PLAIN, damaged, LIMIT).shape == (3, 4, 4)
    except InvalidRequest as fault:
        assert "\n" not in fault.message  # either is right
