"""Pictures to tensors, by Pillow: decoded within bounds, then resized and normalised as the model wants it."""

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from dormouse.errors import InvalidRequest
from dormouse.tasks.description import ImageInput
from dormouse.tasks.scans import MOST_SCANS, USUAL_SCANS, scans_in

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Those of photographs and of the web; Pillow reads others, whose decoders nobody needs here."""
LONGEST_SIDE = 65_500
"""As libjpeg has it, for every format: longer ones are lines, for which decoders are slow."""
LIGHT_PIXELS = 4_000_000
TOO_MUCH_MEMORY = "the picture takes too much memory to decode; send a smaller one"

# Pillow's own limit, a warning and then an error, is not the operator's; ours is looked at before anything is decoded.
Image.MAX_IMAGE_PIXELS = None

Pixels = npt.NDArray[np.float32]


class TooHeavy(Exception):
    """Its head says that decoding will take a while."""


def pixels_of(image: ImageInput, file: bytes | memoryview, most_pixels: int, *, light: bool = False) -> Pixels:
    """Colour, height, width. Raises InvalidRequest for what is no picture, or one of more than ``most_pixels``; where
    only what is ``light`` is wanted, TooHeavy, before it is decoded."""
    decoded = _decoded(file, most_pixels, light=light)
    if image.shortest_edge is None:
        decoded = decoded.resize((image.width, image.height), _resampling(image))
    else:
        decoded = _middle(_shrunk(decoded, image, image.shortest_edge, most_pixels), image.width, image.height)
    values: Pixels = np.asarray(decoded, np.float32) * np.float32(image.scale)
    values -= np.asarray(image.mean, np.float32)
    values /= np.asarray(image.deviation, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def _decoded(file: bytes | memoryview, most_pixels: int, *, light: bool) -> Image.Image:
    """In upright position and three colours. The size is in the file's head, and is looked at before anything else."""
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as opened:
            scans = _checked(opened, file, most_pixels)
            if light and (opened.width * opened.height > LIGHT_PIXELS or scans > USUAL_SCANS):
                raise TooHeavy
            return _in_eight_bits(ImageOps.exif_transpose(opened)).convert("RGB")
    except (InvalidRequest, TooHeavy):
        raise
    except MemoryError:
        raise InvalidRequest(TOO_MUCH_MEMORY) from None
    except Exception as fault:  # decoders of broken files raise whatever they please
        raise InvalidRequest(f"the picture cannot be read: {_one_line(fault)}; send {', '.join(FORMATS)}") from None


def _checked(opened: Image.Image, file: bytes | memoryview, most_pixels: int) -> int:
    """How many scans it has. Raises InvalidRequest for what would take too long, or too much."""
    width, height = opened.size
    if width * height > most_pixels:
        raise _too_large(width, height, most_pixels)
    if max(width, height) > LONGEST_SIDE:
        raise InvalidRequest(f"the picture has {width}x{height} pixels, {LONGEST_SIDE} are the limit of a side")
    scans = scans_in(file) if opened.format in ("JPEG", "MPO") else 1
    if scans > MOST_SCANS:
        raise InvalidRequest(f"the picture has more than {MOST_SCANS} scans; save it as a JPEG that has fewer")
    return scans


def _in_eight_bits(upright: Image.Image) -> Image.Image:
    """Pillow would cut gray of sixteen bits off at 255."""
    if not upright.mode.startswith("I"):
        return upright
    values = np.asarray(upright).astype(np.uint32)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _too_large(width: int, height: int, most_pixels: int) -> InvalidRequest:
    return InvalidRequest(
        f"the picture has {width}x{height} pixels, {most_pixels} are the limit of this server (--image-pixels)"
    )


def _one_line(fault: Exception) -> str:
    if isinstance(fault, UnidentifiedImageError):  # which would tell of an object at an address
        return "it has no known format"
    return (str(fault).splitlines() or [type(fault).__name__])[0][:200]


def _resampling(image: ImageInput) -> Image.Resampling:
    return Image.Resampling[image.resampling.upper()]


def _shrunk(decoded: Image.Image, image: ImageInput, edge: int, most_pixels: int) -> Image.Image:
    """The shorter edge gets the wanted length, the other what keeps the proportions."""
    shorter, longer = sorted(decoded.size)
    other = int(edge * longer / shorter)
    if edge * other > most_pixels:  # a line of one pixel's height would become a giant
        raise _too_large(edge, other, most_pixels)
    size = (edge, other) if decoded.width <= decoded.height else (other, edge)
    return decoded.resize(size, _resampling(image))


def _middle(decoded: Image.Image, width: int, height: int) -> Image.Image:
    """What is smaller is framed in black."""
    left, top = (decoded.width - width) // 2, (decoded.height - height) // 2
    return decoded.crop((left, top, left + width, top + height))
