"""How many lines of a batch are asked at once. Pure: times come in.

Lines take the room that others leave, and that is room in steps: an engine with a place for a line
still takes longer over each step with it. So where it is known how long engines' steps are, there
are as many lines as make them nearly as long as the objective for later tokens allows, whether or
not the batch is due soon: what others leave tonight may be gone tomorrow. Where it is not, there
are few, and more only where those few would not be answered before they are due. In either case
none more while those that are asked wait, and half as many, down to one, each time that others'
requests have missed their objectives.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Of the objective for later tokens, what steps may take with lines in them. A policy plans with
# more (`Rules.tpot_margin`) and has slices for what varies: lines take of that, and requests feel
# it. Twelve hours of the conversations that settings are chosen on (docs/results/policies.md), in
# batches of 4 h: with 0.65 requests are served as before, and lines cost as much as on spot; with
# 0.7 they are within their objectives in 99.5 of 100 cases in place of 99.7, and lines cost two
# thirds; with 0.75 in 99.2, and two fifths.
STEP_SHARE = 0.7
# Of the room in steps, what is taken at a time: the prompts of many lines at once would fill steps
# for a while, and others look at the same steps.
_TAKEN_AT_ONCE = 0.1
# A batch that is done with this part of its time left over is in time though lines take longer.
_MARGIN = 1.2
# Of the lines that a batch may have without being in time, those that may wait for an engine while
# more are asked: engines have room.
_SHARE_WAITING = 0.1
# How long ago what a gateway tells of objectives may have been: as long as its window is.
SEEN_FOR_S = 30.0


@dataclass(frozen=True, slots=True)
class EnginePace:
    """The steps of a model's engines lately: `step_s` long on average, with so many sequences.

    `num_sequences` are on all engines together. Steps are to take `most_s` at most.
    """

    num_sequences: float
    step_s: float
    most_s: float

    @property
    def room(self) -> int:
        """How many sequences more may run, or fewer should.

        A step takes at most so many times longer as it has more sequences, so that this is no more
        than there is.
        """
        return math.floor(self.num_sequences * (self.most_s / self.step_s - 1))


def mean_step(engines: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Returns how many sequences engines have together, and how long their steps are on average.

    Of each engine come its sequences and the length of its steps, in seconds, which count by its
    sequences. `None` where no engine has a sequence.
    """
    num_all = weighed_s = 0.0
    for num_sequences, step_s in engines:
        num_all += num_sequences
        weighed_s += num_sequences * step_s
    return (num_all, weighed_s / num_all) if weighed_s > 0 else None


def few_wait(num_waiting: float, least: int) -> bool:
    """Whether so few lines wait for an engine that there is room for more.

    `least` is how many a batch asks at once without being in time.
    """
    return num_waiting <= _SHARE_WAITING * least


def _no() -> bool:
    return False


def _unknown(_names: Iterable[str]) -> EnginePace | None:
    return None


@dataclass(frozen=True, slots=True)
class LineRoom:
    """What there is for the lines of one batch.

    `most` are asked at once, `has_room` says that they do not wait, and `is_pressed` that others'
    requests lately missed their objectives. `pace` is that of the models that lines name, `None`
    while it is not known or no objective bounds it; `num_batches` share what it leaves. Without a
    gateway a batch has what its settings say.
    """

    most: Callable[[], int] = lambda: 0
    has_room: Callable[[], bool] = _no
    is_pressed: Callable[[], bool] = _no
    pace: Callable[[Iterable[str]], EnginePace | None] = _unknown
    num_batches: Callable[[], int] = lambda: 1


@dataclass(frozen=True, slots=True)
class LinesLeft:
    """So many lines, which are due in `left_s`. One is answered in `line_s`, if any was."""

    num_lines: int
    left_s: float
    line_s: float | None


def lines_in_time(now: int, least: int, most: int, left: LinesLeft, *, has_room: bool) -> int:
    """Returns how many lines to ask at once to be done in time, of which there are `now`.

    It is `least`, or more if it has to be; at most twice as many as now, and none more where lines
    wait or are refused.
    """
    if left.line_s is None or left.num_lines <= 0:
        return min(max(now, least), 2 * now)
    rate = left.num_lines / max(left.left_s, left.line_s, 1e-3)
    needed = min(max(math.ceil(_MARGIN * rate * left.line_s), least), max(most, least))
    if needed <= now:
        return needed
    return min(needed, 2 * now) if has_room else now


def lines_by_pace(now: int, least: int, most: int, room: int, *, has_room: bool) -> int:
    """Returns how many lines to ask at once beside others, of which there are `now`.

    `room` are sequences that engines may have more, or are to have fewer. Twice as many lines as
    now at most, one at least, and none more where lines wait or are refused.
    """
    by_pace = now + (math.ceil(_TAKEN_AT_ONCE * room) if room > 0 else room)
    if not has_room:
        by_pace = min(by_pace, now)
    return max(1, min(by_pace, max(most, least), 2 * now))


class LineTuner:
    """Decides how many lines to ask at once, time after time."""

    def __init__(self, room: LineRoom, least: int) -> None:
        self._room = room
        self._least = least
        self._look_again_s = -math.inf

    def lines(
        self,
        now_s: float,
        num_now: int,
        left: LinesLeft,
        names: Iterable[str],
        *,
        is_refused: bool,
    ) -> int:
        """Returns how many to ask, of lines that name these models.

        `is_refused` says that some were refused since the last time.
        """
        if now_s < self._look_again_s:
            return num_now
        if self._room.is_pressed():
            # What is seen then is of before.
            self._look_again_s = now_s + SEEN_FOR_S
            return max(1, num_now // 2)
        has_room = not is_refused and self._room.has_room()
        least, most, pace = self._least, self._room.most(), self._room.pace(names)
        if pace is None:
            return lines_in_time(num_now, least, most, left, has_room=has_room)
        room = pace.room // max(1, self._room.num_batches())
        return lines_by_pace(num_now, least, most, room, has_room=has_room)
