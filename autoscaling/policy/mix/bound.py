"""Decides which of the slices that classes are asked for there may be within a maximum. Pure.

The maximum bounds what can be there at once, so an order counts though nothing came of it yet. What
is there and does not go now comes first. So in place of slices that stay until others are ready,
as many are ordered as there is room for, and then the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# Where nothing else makes room, a slice of so many goes before another is ready in its place.
_ONE_OF = 10


@dataclass(frozen=True, slots=True)
class SliceClaim:
    """The slices that a class is to have: with each of `levels` more, the most urgent ones first.

    `stays` of them are there and do not go now. Of one level the lower `price` goes first.
    """

    compute_class: str
    stays: int
    levels: tuple[int, ...]
    price: float


def granted(max_slices: int, claims: Iterable[SliceClaim]) -> dict[str, int]:
    """Returns how many slices each class may have.

    Together they are `max_slices` at most, or what stays where that is more.
    """
    by_price = sorted(claims, key=lambda each: (each.price, each.compute_class))
    counts = {each.compute_class: each.stays for each in by_price}
    room = max_slices - sum(counts.values())
    num_levels = max((len(each.levels) for each in by_price), default=0)
    for level in range(num_levels):
        for each in by_price:
            more = min(each.levels[level] - counts[each.compute_class], room)
            if more > 0:
                counts[each.compute_class] += more
                room -= more
    return counts


def makes_room(max_slices: int, num_staying: int, num_ready: int, num_coming: int) -> bool:
    """Returns whether a slice goes to make room for another one, before that is ready.

    Where a model needs all that it may have, no class could be exchanged for a cheaper one
    otherwise. One goes at a time, and none of a few: serving comes before saving.
    """
    return num_staying >= max_slices and num_coming == 0 and num_ready >= _ONE_OF
