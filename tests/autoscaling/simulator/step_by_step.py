"""Engines simulated step by step, every step an event: what the leaping kernel is held to.

Where a request goes is the gateway's own choice, of the engines as they are at that moment.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import Requests
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.overdue import is_turn_of_overdue, others_work_after, overdue_after_s
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.capacity.step_places import LOOK_S, PLACES_SHARE, Places, StepSums
from serving.gateway.dispatch.choice.engine_table import UNBOUNDED, EngineColumns
from serving.gateway.dispatch.choice.routing import Route, Wish, choose_engine
from serving.gateway.dispatch.known_room import Need

NO_LINES = Requests(np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass
class StepEngine:
    """One engine, every step of it."""

    law: CapacityProfile
    queue: deque[list[int]] = field(default_factory=deque)  # request, prompt tokens left
    running: dict[int, int] = field(default_factory=dict)  # request to tokens left
    step_end_s: float = np.inf
    in_flight: int = 0
    dispatched: int = 0
    places: Places = field(default_factory=lambda: Places(0))
    fewest_places: int = 0
    done: StepSums = field(default_factory=StepSums)
    began_s: float = 0.0
    looked_s: float = 0.0
    is_changing: bool = False  # in the step under way a prompt is computed, or something came

    def __post_init__(self) -> None:
        self.fewest_places = self.law.max_num_seqs
        self.places = Places(self.fewest_places)

    @property
    def line_tokens(self) -> int:
        return sum(left for _, left in self.queue)

    @property
    def has_place(self) -> bool:
        has_line = self.line_tokens >= self.law.max_num_batched_tokens
        return self.in_flight < self.places.num and not has_line

    def look(self, now_s: float, token_s: float) -> None:
        """Notes the step that ends now; each second its places are bounded by what it did.

        As the kernel does, it looks when what it has changes.
        """
        done = self.done
        self.done = StepSums(
            done.num_tokens + len(self.running),
            done.num_turns + 1,
            done.busy_s + now_s - self.began_s,
        )
        self.is_changing |= any(left == 1 for left in self.running.values())
        if self.is_changing and now_s - self.looked_s >= LOOK_S:
            most = self.law.max_num_seqs
            self.places = self.places.after(self.done, now_s, most=most, token_s=token_s)
            self.fewest_places = min(self.fewest_places, self.places.num)
            self.done, self.looked_s = StepSums(), now_s

    def begin_step(self, now_s: float, output_tokens: np.ndarray) -> None:
        budget = self.law.max_num_batched_tokens - len(self.running)
        prompt_tokens = 0
        while self.queue and budget > 0 and len(self.running) < self.law.max_num_seqs:
            first = self.queue[0]
            chunk = min(first[1], budget)
            first[1] -= chunk
            budget -= chunk
            prompt_tokens += chunk
            if first[1] > 0:
                break
            self.running[first[0]] = int(output_tokens[first[0]])
            self.queue.popleft()
        length_s = self.law.base_s + self.law.per_sequence_s * len(self.running)
        length_s += self.law.per_prompt_token_s * prompt_tokens
        is_busy = self.running or prompt_tokens
        self.began_s, self.is_changing = now_s, prompt_tokens > 0
        self.step_end_s = now_s + length_s if is_busy else np.inf


class StepByStep:
    """Engines, requests and lines of one batch, of which so many are on engines at once."""

    def __init__(
        self,
        requests: Requests,
        law: CapacityProfile,
        num_engines: int,
        lines: Requests = NO_LINES,
        num_at_once: int = 0,
        others: Sequence[CapacityProfile] = (),
        objectives: Objectives | None = None,
    ) -> None:
        self.requests = requests
        self.token_s, self.overdue_after_s = np.inf, np.full(len(requests), np.inf)
        if objectives is not None:
            self.token_s = PLACES_SHARE * objectives.tpot_s
            ttft_s = objectives.ttft_of(requests.input_tokens) - law.ttft_floor_s
            self.overdue_after_s = overdue_after_s(ttft_s)
        self.input_tokens = np.concatenate([requests.input_tokens, lines.input_tokens])
        self.output_tokens = np.concatenate([requests.output_tokens, lines.output_tokens])
        self.law, self.num_at_once = law, num_at_once
        self.engines = [StepEngine(law) for _ in range(num_engines)]
        self.engines += [StepEngine(each) for each in others]
        self.ends = [(np.inf, place) for place in range(len(self.engines))]
        self.next_line = len(requests)
        self.num_lines = 0
        self.waiting: list[int] = []
        self.overdue: list[int] = []
        self.others_work = 0.0
        self.first_s = np.full(len(self.output_tokens), np.nan)
        self.last_s = self.first_s.copy()

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last token of each request, then of each line, in seconds since the start."""
        arrived = 0
        self._give_lines(0.0)
        while True:
            is_any = arrived < len(self.requests)
            arrival_s = self.requests.arrival_s[arrived] if is_any else np.inf
            end_s, place = self.ends[0]
            if min(end_s, arrival_s) == np.inf:
                return self.first_s, self.last_s
            if end_s <= arrival_s:
                heapq.heappop(self.ends)
                self._end_step(place, end_s)
                heapq.heappush(self.ends, (self.engines[place].step_end_s, place))
                if self.engines[place].has_place:
                    self._serve(end_s)
                self._give_lines(end_s)
                continue
            self.waiting.append(arrived)
            self._serve(arrival_s)
            arrived += 1
            self._give_lines(arrival_s)

    def _serve(self, now_s: float) -> None:
        """Gives those that wait to engines, in their order, as far as there is room."""
        while (line := self._line_in_turn(now_s)) is not None:
            route = self._choice(line[0])
            if route.engine_id is None:
                return
            work, is_overdue = float(self.input_tokens[line[0]]), line is self.overdue
            after = others_work_after(self.others_work, work, is_overdue=is_overdue)
            self.others_work = after if self.overdue else 0.0
            self._put(line.pop(0), int(route.engine_id), now_s)

    def _line_in_turn(self, now_s: float) -> list[int] | None:
        """The line whose first is next; what can be in time no more goes behind the others."""
        while self.waiting:
            first = self.waiting[0]
            if now_s - self.requests.arrival_s[first] < self.overdue_after_s[first]:
                break
            self.overdue.append(self.waiting.pop(0))
        if self.overdue:
            work = float(self.input_tokens[self.overdue[0]])
            if not self.waiting or is_turn_of_overdue(self.others_work, work):
                return self.overdue
        return self.waiting or None

    def _choice(self, request: int) -> Route:
        engines = self.engines
        # Zeros in front, so that ids are in the order of places.
        ids = [f"{place:03d}" for place in range(len(engines))]
        columns = EngineColumns.of(ids, (False for _ in engines))
        for row, engine in enumerate(engines):
            columns.num_in_flight[row] = engine.in_flight
            columns.num_dispatched[row] = engine.dispatched
            columns.backlog_tokens[row] = engine.line_tokens
            columns.kv_tokens[row] = UNBOUNDED
            columns.has_place[row] = engine.has_place
            has_sequence = engine.in_flight < engine.places.num
            columns.has_full_line[row] = has_sequence and not engine.has_place
        need = Need(int(self.input_tokens[request]))
        rows = {engine_id: row for row, engine_id in enumerate(ids)}
        return choose_engine(columns, rows, Wish(need, number=kernel.number_of(request)))

    def _end_step(self, place: int, end_s: float) -> None:
        engine = self.engines[place]
        engine.look(end_s, self.token_s)
        for request in list(engine.running):
            if engine.running[request] == self.output_tokens[request]:
                self.first_s[request] = end_s
            engine.running[request] -= 1
            if engine.running[request] == 0:
                del engine.running[request]
                engine.in_flight -= 1
                self.num_lines -= request >= len(self.requests)
                self.last_s[request] = end_s
        engine.begin_step(end_s, self.output_tokens)

    def _least_used(self) -> int:
        engines = self.engines
        return min(
            range(len(engines)), key=lambda n: (engines[n].in_flight, engines[n].dispatched, n)
        )

    def _give_lines(self, now_s: float) -> None:
        while (
            not self.waiting
            and not self.overdue
            and self.num_lines < self.num_at_once
            and self.next_line < len(self.output_tokens)
        ):
            place = self._least_used()
            engine = self.engines[place]
            if engine.queue or engine.in_flight >= engine.places.num:
                return
            self._put(self.next_line, place, now_s)
            self.next_line += 1
            self.num_lines += 1

    def _put(self, request: int, place: int, now_s: float) -> None:
        engine = self.engines[place]
        engine.queue.append([request, int(self.input_tokens[request])])
        engine.in_flight += 1
        engine.dispatched += 1
        engine.is_changing |= len(engine.running) < engine.law.max_num_seqs
        if engine.step_end_s == np.inf:
            engine.begin_step(now_s, self.output_tokens)
            self.ends.remove((np.inf, place))
            heapq.heapify(self.ends)
            heapq.heappush(self.ends, (engine.step_end_s, place))
