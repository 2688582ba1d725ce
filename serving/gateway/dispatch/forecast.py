"""How long a request will wait for room, and whether it is let in to wait. Pure.

A request whose first token cannot come in its client's time is refused when it comes, and told when
to come back. The time is that for the work before it, at the rate at which engines have lately
taken work from a line that never ended, and what a first token takes after that at least
(`first_token_times`). Who is told to come back has a place in that line: those
who come meanwhile stand behind it, so that the promise holds. Promises to those who do not come
lapse.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from serving.domain.capacity.overdue import OVERDUE_PART
from serving.domain.errors import DeadlineTooShortError
from serving.gateway.dispatch.first_token_times import FirstTokenTimes
from serving.gateway.dispatch.requests import Account, InFlightRequest
from serving.gateway.dispatch.waiting import WaitingRequests
from serving.gateway.telemetry.request_telemetry import RequestContext

# In so many seconds the past counts half; while engines are full, the last takes that a rate rests
# on count whole, however seldom such engines take something.
_HALF_LIFE_S = 30.0
# So long engines have to have been full, added up over them, and so many requests have to have been
# taken meanwhile, before their rate is believed: by fewer it is off by a third and more.
_LEAST_ENGINE_S = 2.0
_LEAST_TAKES = 8.0
# When what has faded is counted anew, and what is forgotten then.
_SMALLEST_UNIT, _SMALLEST_WORK = 1e-3, 1.0
# A forecast is so much off now and then, and a client who was let in is not to wait in vain.
MARGIN = 1.15
_ROUNDS = 4
# Whatever else comes, so much of the engines is left for a line.
_LEAST_PART = 0.05
# Who comes back so many seconds before the time that it was told is on time: clocks and rounding.
_EARLY_S = 1.0
# Promises are a few hundred bytes each. Beyond so many a refused request has no place.
MOST_PROMISES = 4096
# Tokens at both ends of a prompt by which a request is known when it comes back.
_KNOWN_BY = 32
# Sequences of one HTTP request come one after the other; so long after the first one that was known
# others are let in with it.
_TOGETHER_S = 5.0


class DrainRate:
    """How much work an engine takes in a second while it could have more, of late, and whose.

    It counts from one take of a line to its last. What runs on engines that have just become full
    may all have begun together, and does not end for as long as its answers take: that nothing is
    taken meanwhile says nothing of the rate.
    """

    def __init__(self) -> None:
        self._work = self._engine_s = self._num_taken = 0.0
        self._at_s = 0.0
        self._num_full = 0
        self._awaits_first = True  # nothing was taken yet since engines were last not full
        # What was taken of each, with its weight, in units that shrink: so all fade at once.
        self._taken: dict[Account, tuple[float, float]] = {}
        self._unit = 1.0

    def look(self, now_s: float, num_full: int) -> None:
        """Notes how many engines are full from now on, while something waits for them."""
        passed_s = now_s - self._at_s
        if passed_s > 0:
            kept = 0.5 ** (passed_s / _HALF_LIFE_S)
            if self._num_full and self._num_taken:
                kept = max(kept, min(1.0, _LEAST_TAKES / self._num_taken))
            self._work *= kept
            self._num_taken *= kept
            engine_s = 0.0 if self._awaits_first else passed_s * self._num_full
            self._engine_s = (self._engine_s + engine_s) * kept
            self._unit *= kept
            if self._unit < _SMALLEST_UNIT:
                self._forget_small()
        self._at_s, self._num_full = now_s, num_full
        if not num_full:
            self._awaits_first = True

    def took(self, request: InFlightRequest, work: float) -> None:
        """Counts a request that an engine took after it had waited for it.

        One that was taken while no engine was full does not count: it waited for something else,
        such as a first engine. `work` is what it counts now, as newcomers do: answers may have
        become longer or shorter since it came.
        """
        if not self._num_full:
            return
        if self._awaits_first:
            # Nor do others of the same moment. Time begins with the look that follows.
            self._awaits_first, self._num_full = False, 0
            return
        self._num_taken += 1
        self._work += work
        account = request.account
        before, _ = self._taken.get(account, (0.0, 0.0))
        self._taken[account] = before + work / self._unit, request.weight

    @property
    def per_engine_s(self) -> float | None:
        """The work that an engine takes in a second; `None` if that is not known yet."""
        if self._engine_s < _LEAST_ENGINE_S or self._num_taken < _LEAST_TAKES:
            return None
        return self._work / self._engine_s

    def parts(self) -> Iterator[tuple[Account, float, float]]:
        """Yields who had what part of all that was taken, 0 to 1, and the weight."""
        if self._work > 0:
            for account, (taken, weight) in self._taken.items():
                yield account, taken * self._unit / self._work, weight

    def _forget_small(self) -> None:
        taken = {
            account: (work * self._unit, weight) for account, (work, weight) in self._taken.items()
        }
        self._taken = {account: each for account, each in taken.items() if each[0] > _SMALLEST_WORK}
        self._unit = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The engines that take requests now, and in how many seconds one more does, if one comes."""

    num_engines: int
    next_engine_in_s: float | None = None

    def time_for_s(self, work: float, per_engine_s: float) -> float:
        """Returns how long the engines take for so much work."""
        rate = self.num_engines * per_engine_s
        alone_s = work / rate
        if self.next_engine_in_s is None or alone_s <= self.next_engine_in_s:
            return alone_s
        left = work - rate * self.next_engine_in_s
        return self.next_engine_in_s + left / (rate + per_engine_s)


@dataclass(frozen=True, slots=True)
class _Promise:
    account: Account
    weight: float
    work: float
    due_s: float


class Promises:
    """The requests that were told to come back, and have not come yet."""

    def __init__(self) -> None:
        self._promises: dict[int, _Promise] = {}
        self._ends: list[tuple[float, int, _Promise]] = []  # a heap; some have been kept
        # Whose they are, their work and the weight.
        self.lines: dict[Account, tuple[float, float]] = {}
        # HTTP requests that have come back, and until when; in order.
        self._back: deque[tuple[float, RequestContext]] = deque()

    def num_at(self, now_s: float) -> int:
        """Returns how many there are, without those that have lapsed by now."""
        self._forget(now_s)
        return len(self._promises)

    def make(self, request: InFlightRequest, due_s: float, until_s: float) -> None:
        """Promises a request its place if it comes back at `due_s`, or a little later.

        One whose prompt is no tokens would not be known again, and has none.
        """
        if not request.prompt_token_ids:
            return
        key = _known_by(request)
        if len(self._promises) >= MOST_PROMISES or key in self._promises:
            return
        promise = _Promise(request.account, request.weight, request.line_work, due_s)
        self._promises[key] = promise
        heapq.heappush(self._ends, (until_s, key, promise))
        self._add(promise, 1)

    def claim(self, request: InFlightRequest, now_s: float) -> bool:
        """Returns whether a request comes back as it was told. The promise is over then.

        So do other sequences of its HTTP request, as with `n`: all of them failed with the first.
        """
        self._forget(now_s)
        context = request.telemetry.context
        if any(other is context for _, other in self._back):
            return True
        if not self._promises:
            return False
        key = _known_by(request)
        if key not in self._promises or self._promises[key].due_s - _EARLY_S > now_s:
            return False
        self._end(key)
        self._back.append((now_s + _TOGETHER_S, context))
        return True

    def _forget(self, now_s: float) -> None:
        """Ends what has lapsed."""
        while self._ends and self._ends[0][0] <= now_s:
            _, key, promise = heapq.heappop(self._ends)
            if self._promises.get(key) is promise:
                self._end(key)
        while self._back and self._back[0][0] <= now_s:
            self._back.popleft()

    def _end(self, key: int) -> None:
        self._add(self._promises.pop(key), -1)

    def _add(self, promise: _Promise, sign: int) -> None:
        work = self.lines.get(promise.account, (0.0, 0.0))[0] + sign * promise.work
        if work >= _SMALLEST_WORK:
            self.lines[promise.account] = work, promise.weight
        else:
            self.lines.pop(promise.account, None)


def _known_by(request: InFlightRequest) -> int:
    prompt = request.prompt_token_ids
    ends = tuple(prompt[:_KNOWN_BY]), tuple(prompt[-_KNOWN_BY:])
    return hash((request.service_class, request.tenant, request.max_tokens, len(prompt), ends))


class LineForecast:
    """Decides who may wait for the engines of one version at one gateway."""

    def __init__(self, waiting: WaitingRequests) -> None:
        self._waiting = waiting
        self._promises = Promises()
        self.rate = DrainRate()

    def num_promised(self, now_s: float) -> int:
        """Returns the number of refused requests that are to come back; `now_s` is of the loop."""
        return self._promises.num_at(now_s)

    def come_back_in_s(
        self,
        request: InFlightRequest,
        capacity: Capacity,
        now_s: float,
        to_first: Callable[[], FirstTokenTimes] = FirstTokenTimes,
        longest_s: float = 0.0,
    ) -> float | None:
        """Returns in how many seconds a request may come back; `None` if it may wait here.

        It may if its first token can come in time, as far as that can be told: after its turn, by
        `to_first`, which is asked only where the answer may depend on it, and never gives more than
        `longest_s`. While the line is less than half as long as that leaves, newcomers may wait
        whatever was promised: engines are not to stand idle for those who do not come back.

        Raises:
            DeadlineTooShortError: no engine makes its first token in the time that it has. The
                client must change it.
        """
        is_back = self._promises.claim(request, now_s)
        wait_s = self.wait_s(request, capacity, now_s)
        left_s = request.first_token_by_s - now_s
        if (wait_s or 0.0) <= (left_s - longest_s) / 2:
            return None
        first = to_first() if longest_s else FirstTokenTimes()
        whole_s = left_s + request.waited_s
        if first.alone_s > whole_s:
            if request.patience_s is not None:
                raise DeadlineTooShortError(first.alone_s, whole_s)
            first = FirstTokenTimes()  # nobody has asked for that: it is to have its turn in time
        # What is in an engine's line now is done by the time that a line here is.
        first_s = first.alone_s if self._waiting else first.soonest_s
        patience_s = left_s - first_s  # for its turn
        is_late_at_once = 0 < first_s > left_s
        if not is_late_at_once and (
            wait_s is None or wait_s <= (patience_s if is_back else patience_s / 2)
        ):
            return None
        promised_s = self.wait_s(request, capacity, now_s, with_promises=True)
        if not is_late_at_once and (
            promised_s is None or (promised_s <= patience_s and not is_back)
        ):
            return None
        # When it comes back it can be in time: it is before those that are overdue by then.
        line_s = self._line_s(request, capacity)
        turn_s = (line_s or 0.0) + first_s - first.alone_s
        again_s = whole_s - first.alone_s  # what it has for its turn when it comes back
        in_s = max(1.0, turn_s - again_s / 2)
        self._promises.make(request, now_s + in_s, now_s + in_s + max(again_s, _EARLY_S))
        return in_s

    def wait_s(
        self,
        request: InFlightRequest,
        capacity: Capacity,
        now_s: float,
        *,
        with_promises: bool = False,
    ) -> float | None:
        """Returns how long a newcomer waits for its turn; `None` if nobody can tell.

        Those that are overdue have their part of the work beside those that can be in time. One
        that will be overdue by its turn has that part at least, from when it is: whoever comes
        meanwhile can be in time, and may have the others.
        """
        if not self._waiting and not with_promises:
            return 0.0
        in_time, overdue = self._waiting.work_ahead(request)
        if with_promises:
            in_time += self._promises.lines.get(request.account, (0.0, 0.0))[0]
        beside = min(overdue, in_time / (OVERDUE_PART - 1))
        own = in_time + beside
        in_time_s = self._time_for_s(request, capacity, own, with_promises=with_promises)
        left_s = request.overdue_at_s - now_s
        if in_time_s is None or in_time_s < left_s:
            return in_time_s
        # Of those before it, so much has its turn as long as it can be in time.
        had = own * left_s / in_time_s if left_s > 0 else 0.0
        own = had + OVERDUE_PART * (in_time + overdue - had)
        return self._time_for_s(request, capacity, own, with_promises=with_promises)

    def _line_s(self, request: InFlightRequest, capacity: Capacity) -> float | None:
        """Returns how long engines take for all that is before a newcomer, and promised."""
        own = sum(self._waiting.work_ahead(request))
        own += self._promises.lines.get(request.account, (0.0, 0.0))[0]
        return self._time_for_s(request, capacity, own, with_promises=True)

    def _time_for_s(
        self, request: InFlightRequest, capacity: Capacity, own: float, *, with_promises: bool
    ) -> float | None:
        """Returns when a newcomer has its turn, behind so much of its `own` tenant's work."""
        per_engine_s = self.rate.per_engine_s
        if per_engine_s is None or not capacity.num_engines:
            return None
        work = self._work_before(request, own, with_promises=with_promises)
        return capacity.time_for_s(work, per_engine_s)

    def _work_before(self, request: InFlightRequest, own: float, *, with_promises: bool) -> float:
        """Returns the work that engines do before it is a newcomer's turn.

        Classes above its own have all that they have and all that comes meanwhile, as lately. Other
        tenants of its class have that too, but no more than their shares while its tenant has its
        `own`. How long `meanwhile` is depends on the sum: a few rounds settle it, from above.
        """
        mine = request.account
        promised = self._promises.lines if with_promises else {}
        others = {account: (part, weight) for account, part, weight in self.rate.parts()}
        others.pop(mine, None)
        lines = {account: work for account, work, weight in self._others(promised, mine)}
        weights = {account: weight for account, _, weight in self._others(promised, mine)}
        weights |= {account: weight for account, (_, weight) in others.items()}
        before = self._waiting.work_before_lines
        left = 1.0  # of engines, by those above
        limits: list[tuple[float, float, float]] = []  # of its class: what waits, comes, and may
        for account, weight in weights.items():
            waits, part = lines.get(account, 0.0), others.get(account, (0.0, 0.0))[0]
            if account[0] < request.service_class:
                before += waits
                left -= part
            elif account[0] == request.service_class:
                limits.append((waits, part, own * weight / request.weight))
        left = max(left, _LEAST_PART)
        work = (before + own + sum(most for _, _, most in limits)) / left
        for _ in range(_ROUNDS):
            others_work = sum(min(most, waits + part * work) for waits, part, most in limits)
            work = (before + own + others_work) / left
        return MARGIN * work

    def _others(
        self, promised: Mapping[Account, tuple[float, float]], mine: Account
    ) -> Iterator[tuple[Account, float, float]]:
        """Yields who else has something in line, how much work that is, and the weight."""
        for service_class, lines in self._waiting.lines.items():
            for tenant, line in lines.items():
                account = service_class, tenant
                if account != mine:
                    yield account, line.work + promised.get(account, (0.0, 0.0))[0], line.weight
        for account, (work, weight) in promised.items():
            if account != mine and account[1] not in self._waiting.lines[account[0]]:
                yield account, work, weight
