"""Where the bytes of an image lie in the arena, cut into the pieces that are copied. Pure arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dormouse.core.types import Bytes
from dormouse.wire import Extent


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are neighbours in the region and in the arena."""

    offset: Bytes
    """In the image, and so in the region."""
    host_offset: Bytes
    size_bytes: Bytes


def pieces_of(
    extents: Sequence[Extent], image_bytes: Bytes, group_bytes: Bytes, most_groups: int = 1
) -> Iterator[list[Piece]]:
    """An image in order, copy by copy, each as the pieces that its extents cut it into. A copy is of one group; or they
    grow, doubling, from one to ``most_groups``."""
    remaining = iter(extents)
    extent = next(remaining)
    begin = 0  # of the extent, in the image
    done, groups = 0, 1
    while done < image_bytes:
        end = min(done + groups * group_bytes, image_bytes)
        groups = min(2 * groups, most_groups)
        group: list[Piece] = []
        while done < end:
            while done >= begin + extent.size_bytes:
                begin += extent.size_bytes
                extent = next(remaining)
            size_bytes = min(end, begin + extent.size_bytes) - done
            group.append(Piece(done, extent.offset + done - begin, size_bytes))
            done += size_bytes
        yield group
