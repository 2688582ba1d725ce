"""Batches of a simulated day: when their lines are asked, how many at once, and what is told of it.

How many lines are asked at once is the gateway's own decision (`capacity.batch_lines`). Does not
own what becomes of a line on an engine (`kernel`). Pure: time comes in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoscaling.simulator.world.arrivals import SimulatedBatch
from autoscaling.simulator.world.engines import Engines, EngineSums
from serving.domain.capacity.batch_due import BatchDue, DueWork, coalesced, last_moment_s
from serving.domain.capacity.batch_lines import (
    STEP_SHARE,
    EnginePace,
    LineRoom,
    LinesLeft,
    LineTuner,
    few_wait,
    mean_step,
)
from serving.domain.limits import BATCH_LINES_IN_FLIGHT

# More lines than that are never asked at once, however many gateways there are.
_MOST_LINES = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchService:
    """What became of batches. `num_kept` had every line answered within their windows."""

    num_batches: int
    num_kept: int
    num_lines: int
    num_in_time: int


class SimulatedLane:
    """The batches of a day, in order of submission. Looked after at every tick."""

    def __init__(
        self, batches: Sequence[SimulatedBatch], engines: Engines, tpot_s: float, tick_s: float
    ) -> None:
        """Takes the engines that were made with these batches."""
        self._batches = batches
        self._engines = engines
        self._most_s = STEP_SHARE * tpot_s
        self._tick_s = tick_s
        self._tuners: dict[int, LineTuner] = {}
        self._limits: dict[int, int] = {}
        self._num_begun = 0
        self._pace: EnginePace | None = None
        self._before: EngineSums | None = None
        self._is_pressed = False
        self._finished_before = 0
        self._line_s: float | None = None

    @property
    def has_any(self) -> bool:
        """Whether there are batches at all."""
        return bool(self._batches)

    def look(self, now_s: float, work: EngineSums | None, *, is_pressed: bool) -> None:
        """Begins and ends batches, and decides how many lines each asks at once.

        `work` is what engines had done by now; `is_pressed` says that requests lately missed their
        objectives.
        """
        if not self._batches:
            return
        self._is_pressed = is_pressed
        self._measure(work)
        while (
            self._num_begun < len(self._batches)
            and self._batches[self._num_begun].submitted_s <= now_s
        ):
            self._begin(self._num_begun, now_s)
            self._num_begun += 1
        for index in list(self._tuners):
            num_left = self._engines.num_lines_left(index)
            if num_left == 0 or now_s >= self._batches[index].expires_at_s:
                self._engines.end_batch(index, now_s)
                del self._tuners[index], self._limits[index]
                continue
            left = LinesLeft(num_left, self._due_at_s(index) - now_s, self._line_s)
            tuner = self._tuners[index]
            limit = tuner.lines(now_s, self._limits[index], left, (), is_refused=False)
            self._limits[index] = limit
            self._engines.set_lines(index, limit, now_s)

    def close(self, now_s: float) -> None:
        """Ends all batches that are open."""
        for index in self._tuners:
            self._engines.end_batch(index, now_s)

    def due(self) -> BatchDue:
        """Returns what a gateway tells of lines that have no answer yet."""
        work = [
            DueWork(self._due_at_s(index), num_left)
            for index in self._tuners
            if (num_left := self._engines.num_lines_left(index))
        ]
        lines = self._engines.lines()
        if not lines.num_finished:
            return BatchDue(coalesced(work))
        return BatchDue(
            coalesced(work),
            lines.input_tokens / lines.num_finished,
            lines.output_tokens / lines.num_finished,
        )

    def service(self) -> BatchService:
        """Returns what became of all batches, once the engines are finished."""
        answers = self._engines.line_answers()
        num_kept = num_in_time = first = 0
        for batch in self._batches:
            # NaN, of what has no end, is not within anything.
            took_s = answers.last_s[first : first + len(batch.lines)]
            in_time = int(np.count_nonzero(took_s <= batch.window_s))
            num_in_time += in_time
            num_kept += in_time == len(batch.lines)
            first += len(batch.lines)
        return BatchService(len(self._batches), num_kept, first, num_in_time)

    def _begin(self, index: int, now_s: float) -> None:
        room = LineRoom(
            most=lambda: _MOST_LINES,
            has_room=lambda: self._has_room(index),
            is_pressed=lambda: self._is_pressed,
            pace=lambda _names: self._pace,
            num_batches=lambda: len(self._tuners),
        )
        self._tuners[index] = LineTuner(room, BATCH_LINES_IN_FLIGHT)
        self._limits[index] = BATCH_LINES_IN_FLIGHT
        self._engines.begin_batch(index, BATCH_LINES_IN_FLIGHT, now_s)

    def _has_room(self, index: int) -> bool:
        waiting = self._limits[index] - self._engines.num_lines_on_engines(index)
        return few_wait(waiting, BATCH_LINES_IN_FLIGHT)

    def _due_at_s(self, index: int) -> float:
        batch = self._batches[index]
        return last_moment_s(batch.submitted_s, batch.expires_at_s)

    def _measure(self, work: EngineSums | None) -> None:
        """Reads how long steps took since the last tick, and how long a line takes."""
        before, self._before = self._before, work
        lines = self._engines.lines()
        num_new = lines.num_finished - self._finished_before
        self._finished_before = lines.num_finished
        if num_new and lines.num_on_engines:
            # Little's law: those under way are the rate times what one takes.
            self._line_s = lines.num_on_engines * self._tick_s / num_new
        self._pace = None
        if before is None or work is None:
            return
        num = min(len(before.num_steps), len(work.num_steps))
        steps = work.num_steps[:num] - before.num_steps[:num]
        busy_s = work.busy_s[:num] - before.busy_s[:num]
        in_flight = np.array(self._engines.in_flight[:num])
        # A slot that another engine has now counts from its next tick on.
        is_known = (steps > 0) & (in_flight > 0) & (busy_s > 0)
        step_s = busy_s[is_known] / steps[is_known]
        seen = mean_step(zip(in_flight[is_known].tolist(), step_s.tolist(), strict=True))
        if seen is not None:
            self._pace = EnginePace(*seen, self._most_s)
