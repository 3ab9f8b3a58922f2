"""TensorShard: a tensor that the ranks hold in parts, as one of them sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # of the annotations: boxes are also those of checkpoints that no tensor of torch is in

Box = tuple[tuple[int, int], ...]  # of every dimension: from, to


@dataclass(frozen=True)
class TensorShard:
    """The boxes of a tensor that are on this rank; none where others have all of it.

    Every element is in some rank's boxes. Where several ranks hold the same box, one of them stores it.
    """

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    pieces: tuple[tuple[Box, torch.Tensor], ...] = ()  # boxes that do not overlap, each with its elements
    stores: bool = True  # whether it is this rank that writes its boxes into a checkpoint

    @property
    def nbytes(self) -> int:
        """Of what is here."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.pieces)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's local tensor of a parameter."""
    here = getattr(tensor, "to_local", None)
    return here() if here is not None else tensor  # type: ignore[no-any-return]


def whole_box(shape: tuple[int, ...]) -> Box:
    """
    >>> whole_box((4, 3))
    ((0, 4), (0, 3))
    """
    return tuple((0, length) for length in shape)


def box_size(box: Box) -> int:
    """How many elements it has.

    >>> box_size(((2, 4), (0, 3)))
    6
    """
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common.

    >>> overlap(((0, 4), (0, 3)), ((2, 6), (1, 2)))
    ((2, 4), (1, 2))
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that take `box` out of a tensor that holds `outer`.

    >>> within(((2, 4), (1, 2)), ((2, 6), (0, 3)))
    (slice(0, 2, None), slice(1, 2, None))
    """
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
