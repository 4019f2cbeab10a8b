"""Reads descriptions beside a model, and of them ``preprocessor_config.json``: how a picture becomes an input."""

import json
from pathlib import Path
from typing import Any, get_args

from dormouse.errors import RefusedSource
from dormouse.tasks.description import ImageInput, Resampling

PREPROCESSOR = "preprocessor_config.json"
RESAMPLINGS: tuple[Resampling, ...] = get_args(Resampling)
"""By Pillow's numbers, which the files have."""
COLOURS = 3


def described(directory: Path | None, name: str) -> dict[str, Any]:
    """What a description file says, and nothing if it is not there. Raises RefusedSource."""
    if directory is None or not (directory / name).is_file():
        return {}
    try:
        said = json.loads((directory / name).read_bytes())
    except (OSError, ValueError) as fault:
        raise RefusedSource(f"{directory / name} cannot be read: {fault}") from None
    return said if isinstance(said, dict) else {}


def image_input(name: str, said: dict[str, Any]) -> ImageInput | None:
    """What the file says of one input; None where it says too little, or something that we do not do."""
    try:
        sizes = _sizes(said)
    except (KeyError, TypeError, ValueError):
        return None
    resampling = said.get("resample", 2)
    unlike = said.get("do_resize") is False or said.get("do_pad") is True or resampling not in range(len(RESAMPLINGS))
    if sizes is None or unlike:
        return None
    height, width, shortest_edge = sizes
    normal = said.get("do_normalize", True)
    rescaled = said.get("do_rescale", True)
    return ImageInput(
        name=name,
        height=height,
        width=width,
        shortest_edge=shortest_edge,
        resampling=RESAMPLINGS[resampling],
        scale=float(said.get("rescale_factor", 1 / 255)) if rescaled else 1.0,
        mean=_colours(said.get("image_mean"), 0.5) if normal else (0.0,) * COLOURS,
        deviation=_colours(said.get("image_std"), 0.5) if normal else (1.0,) * COLOURS,
    )


def _sizes(said: dict[str, Any]) -> tuple[int, int, int | None] | None:
    """Height, width, and to what the shorter edge is resized before the middle is taken."""
    size = said["size"]
    size = {"height": size, "width": size} if isinstance(size, int) else size
    if said.get("crop_pct"):  # ConvNeXT and its kin: small pictures are cut from slightly larger ones
        edge = int(size.get("shortest_edge") or size["height"])
        if edge >= 384:
            return edge, edge, None
        return edge, edge, int(edge / float(said["crop_pct"]))
    crop = said.get("crop_size")
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    cropped = crop is not None and said.get("do_center_crop") is True
    if "shortest_edge" in size:
        return (int(crop["height"]), int(crop["width"]), int(size["shortest_edge"])) if crop and cropped else None
    if cropped and crop != size:  # it would be framed
        return None
    return int(size["height"]), int(size["width"]), None


def _colours(values: Any, default: float) -> tuple[float, ...]:
    """One value for each colour, or the same for all."""
    if isinstance(values, list) and len(values) == COLOURS:
        return tuple(float(value) for value in values)
    return (float(values) if isinstance(values, int | float) else default,) * COLOURS
