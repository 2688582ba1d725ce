"""Compares an answer with the known one: which tokens are lost, repeated or foreign.

Pure. The definitions:

- The answer is read along the expected one. Where they differ, it is taken up again at the nearest
  place, counted in tokens skipped on both sides, from where `ANCHOR` tokens agree; or, if there is
  none, from where both agree to their ends. What was skipped is a difference.
- *lost*: expected tokens in differences.
- *repeated*: received tokens in differences that repeat what came just before them, or a run of
  at least `ANCHOR` tokens of what was received earlier.
- *foreign*: all other received tokens in differences.

So a gap, a cut end, a run that came twice and a run that belongs elsewhere are counted to the
token, wherever `ANCHOR` intact tokens (or the end) follow them. A foreign run may match by chance
what was expected or what came before; then it counts as right or repeated.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Eight tokens of an alphabet of 26 agree by chance once in 2e11 places.
ANCHOR = 8


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The place where an answer differs from the expected one.

    `received_from` is the position in the answer at which it begins; `lost` expected tokens are
    missing there. Of the received ones so many are `repeated` and `foreign`.
    """

    received_from: int
    lost: int
    repeated: int
    foreign: int


def diff_answers(expected: Sequence[int], received: Sequence[int]) -> Iterator[TokenDifference]:
    """Yields every difference of `received`, in its order; none if both are equal."""
    wanted, got = list(expected), list(received)
    anchors: dict[tuple[int, ...], list[int]] | None = None
    at = here = 0  # in `wanted` and in `got`
    while True:
        run = _common(wanted, at, got, here)
        at, here = at + run, here + run
        if at == len(wanted) and here == len(got):
            return
        if anchors is None:
            anchors = _anchors(wanted)
        lost, extra = _skips(anchors, wanted, at, got, here)
        repeated = _repeated(got, here, extra, is_insertion=not lost)
        yield TokenDifference(here, lost, repeated, extra - repeated)
        at, here = at + lost, here + extra


def _common(wanted: list[int], at: int, got: list[int], here: int) -> int:
    """Returns how many tokens agree from these positions on."""
    most = min(len(wanted) - at, len(got) - here)
    if wanted[at : at + most] == got[here : here + most]:
        return most
    return next(step for step in range(most) if wanted[at + step] != got[here + step])


def _anchors(tokens: list[int]) -> dict[tuple[int, ...], list[int]]:
    """The positions, ascending, of every run of `ANCHOR` tokens."""
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place in range(len(tokens) - ANCHOR + 1):
        places[tuple(tokens[place : place + ANCHOR])].append(place)
    return places


def _skips(
    anchors: dict[tuple[int, ...], list[int]], wanted: list[int], at: int, got: list[int], here: int
) -> tuple[int, int]:
    """Returns how many tokens to skip of `wanted` and of `got`, until they agree again."""
    best: tuple[int, int] | None = None
    for place in range(here, len(got) - ANCHOR + 1):
        extra = place - here
        if best is not None and extra >= sum(best):
            break
        others = anchors.get(tuple(got[place : place + ANCHOR]), [])
        nearest = bisect_left(others, at)
        if nearest == len(others):
            continue
        lost = others[nearest] - at
        if best is None or lost + extra < sum(best):
            best = (lost, extra)
    if best is not None:
        return best
    tail = _common(wanted[at:][::-1], 0, got[here:][::-1], 0)
    return len(wanted) - at - tail, len(got) - here - tail


def _repeated(got: list[int], start: int, length: int, *, is_insertion: bool) -> int:
    """Returns how many of the `length` tokens from `start` on were received before.

    A run put in between resembles the same one some places earlier, where the tokens before it
    are those at its end: each such place is tried, and the best counts.
    """
    most = 0
    for begin in range(start, max(start - length, -1), -1):
        most = max(most, _repeated_at(got, begin, length))
        if most == length or not is_insertion or begin == 0:
            break
        if got[begin - 1] != got[begin - 1 + length]:
            break
    return most


def _repeated_at(got: list[int], begin: int, length: int) -> int:
    run = got[begin : begin + length]
    for period in range(1, min(length, begin) + 1):
        if got[begin - period : begin + length - period] == run:
            return length
    before = _anchors(got[:begin])
    count = place = 0
    while place <= length - ANCHOR:
        others = before.get(tuple(run[place : place + ANCHOR]), ())
        longest = max((_common(run, place, got[:begin], other) for other in others), default=0)
        count += longest
        place += max(1, longest)
    return count
