"""Patches and frames of many sizes in arrays of few sizes, so that a tower compiles a handful of programs and no more.

Items are put end to end into packs of at most the largest size of a ladder, longest first, each into the first pack
with room; then each pack takes the smallest size of the ladder that holds it. A tower runs pack by pack, so that the
number of packs is data, and compiles one program for each size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from yatt_jax.data.packing import first_fit_decreasing
from yatt_jax.types import MediaItem


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Sizes of packs.

    Attributes:
      sizes: places of a pack, ascending.
      align: places that the beginning of each item is a multiple of.
    """

    sizes: tuple[int, ...]
    align: int = 1

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes {self.sizes}: expected some, ascending")
        if self.align < 1 or any(size % self.align for size in self.sizes) or self.sizes[0] < 1:
            raise ValueError(f"sizes {self.sizes}: expected multiples of align = {self.align}")

    @classmethod
    def up_to(cls, largest: int, *, rungs: int = 3, ratio: int = 4, align: int = 1) -> Ladder:
        """A ladder from the size of the largest item down.

        Args:
          largest: places of the largest possible item.
          rungs: how many sizes, and so programs.
          ratio: of each size to the one below.
          align: see the attribute.
        """
        sizes = {-(-max(largest // ratio**i, 1) // align) * align for i in range(rungs)}
        return cls(tuple(sorted(sizes)), align)

    def size(self, places: int) -> int:
        """The smallest size with so many places.

        Raises:
          ValueError: there is none.
        """
        if places > self.sizes[-1]:
            raise ValueError(f"{places} places, and the largest pack has {self.sizes[-1]}")
        return min(size for size in self.sizes if size >= places)


@dataclasses.dataclass(frozen=True)
class Pack:
    """Items end to end.

    Attributes:
      values: their patches or frames, zeros where there is none.
      item: number of the item that each place belongs to, from 1; 0 where there is none.
      members: indices of the items, in order.
      starts: first place of each.
    """

    values: Float[np.ndarray, "P F"]
    item: Int[np.ndarray, "P"]
    members: tuple[int, ...]
    starts: tuple[int, ...]


def plan(lengths: Sequence[int], ladder: Ladder) -> list[tuple[int, list[int]]]:
    """Which items go into which pack, without their values.

    Args:
      lengths: places that each item takes.
      ladder: the sizes.

    Returns:
      Of each pack its size, and the indices of its items.

    Raises:
      ValueError: an item larger than the largest size.
    """
    room = [-(-length // ladder.align) * ladder.align for length in lengths]
    ladder.size(max(room, default=0))
    packs = first_fit_decreasing(room, ladder.sizes[-1])
    return [(ladder.size(sum(room[i] for i in members)), members) for members in packs]


def fill(items: Sequence[MediaItem], ladder: Ladder) -> list[Pack]:
    """Packs of items of one kind of tower.

    Args:
      items: images and videos, or audios.
      ladder: the sizes.

    Raises:
      ValueError: an item larger than the largest size.
    """
    packs = []
    for size, members in plan([len(item.values) for item in items], ladder):
        values = np.zeros((size, items[members[0]].values.shape[1]), np.float32)
        number, starts, at = np.zeros(size, np.int32), [], 0
        for n, i in enumerate(members, 1):
            own = items[i].values
            values[at : at + len(own)], number[at : at + len(own)] = own, n
            starts.append(at)
            at += -(-len(own) // ladder.align) * ladder.align
        packs.append(Pack(values, number, tuple(members), tuple(starts)))
    return packs


def feature_index(
    shape: tuple[int, int],
    places: Sequence[tuple[int, int, int]],
    items: Sequence[MediaItem],
    firsts: Mapping[int, int],
) -> Int[np.ndarray, "B T"]:
    """Which feature each token of a batch is replaced with.

    Several rows may name one item, as the samples of a group do: its features are computed once.

    Args:
      shape: rows and tokens.
      places: of each medium in the batch its row, first token, and index among ``items``.
      items: the media.
      firsts: by index of an item, the number of its first feature among all that the towers made.

    Returns:
      The number of the feature; -1 for text.
    """
    index = np.full(shape, -1, np.int32)
    for row, first, i in places:
        count = items[i].tokens
        index[row, first : first + count] = np.arange(firsts[i], firsts[i] + count)
    return index
