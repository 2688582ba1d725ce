"""The requests of one version that wait for an engine, in the order in which they get one. Pure.

First are those that were on an engine before, as they came: their clients see an answer stand
still. Then come the classes of service in their order, and within each the tenants by turns
(`tenant_shares`), and within a tenant the request whose first token is due first. Batch work that
was on an engine before is first in its tenant's line only. Those of a tenant that can be in time no
more stand behind its others, and have a fourth of the work that it has (`overdue`).
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from serving.domain.capacity.overdue import is_turn_of_overdue, others_work_after
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.usage.tenant_shares import TenantShares
from serving.gateway.dispatch.requests import Account, InFlightRequest
from serving.link.messages import BEFORE_ALL_CLASSES, RoomWanted, WaitingLine

# So many entries of requests that wait no more are kept in the heap, and no memory is lost by that.
_SPARE_DEADLINES = 64
# Engines hear of so many lines: those behind have their turns later.
_MOST_LINES_TOLD = 16
# When its first token is due, a number that no other has, and the request.
_Entry = tuple[float, int, InFlightRequest]


@dataclass(slots=True)
class TenantLine:
    """What waits of one tenant in one class. `work` is in tokens of prompts (`tenant_shares`).

    What can be in time is apart from what is `overdue`; both are sorted.
    """

    weight: float
    work: float = 0.0
    num_tokens: int = 0  # that have to be computed for them
    in_time: list[_Entry] = field(default_factory=list)
    overdue: list[_Entry] = field(default_factory=list)
    _overdue_work: float = 0.0
    # Had by those that can be in time, while others were overdue that had no part of it yet.
    _others_work: float = 0.0
    # A heap of when those that came can be in time no more; some have gone.
    _becoming: list[tuple[float, int, _Entry]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.in_time) + len(self.overdue)

    def add(self, entry: _Entry) -> None:
        """Takes a request in, among those that can be in time until it is looked at."""
        bisect.insort(self.in_time, entry)
        if entry[2].overdue_at_s < math.inf:
            heapq.heappush(self._becoming, (entry[2].overdue_at_s, entry[1], entry))
        self.work += entry[2].line_work
        self.num_tokens += entry[2].num_tokens

    def remove(self, entry: _Entry) -> None:
        """Takes one out that is here."""
        if (place := _place_of(entry, self.overdue)) is not None:
            del self.overdue[place]
            self._overdue_work -= entry[2].line_work
        else:
            del self.in_time[bisect.bisect_left(self.in_time, entry)]
        self.work -= entry[2].line_work
        self.num_tokens -= entry[2].num_tokens

    def in_turn(self, now_s: float) -> Iterator[InFlightRequest]:
        """Yields its requests, whose turn is next first."""
        self._put_behind(now_s)
        first, then = self.in_time, self.overdue
        if then and is_turn_of_overdue(self._others_work, then[0][2].line_work):
            first, then = then, first
        for _, _, request in itertools.chain(first, then):
            yield request

    def has_turn(self, entry: _Entry) -> None:
        """Counts the turn of one that is here."""
        if not self.overdue:
            self._others_work = 0.0
            return
        is_overdue = _place_of(entry, self.overdue) is not None
        work = entry[2].line_work
        self._others_work = others_work_after(self._others_work, work, is_overdue=is_overdue)

    def work_ahead(self, request: InFlightRequest) -> tuple[float, float]:
        """Returns the work of those due before a newcomer: that can be in time, and is overdue."""
        overdue = self._overdue_work if self.overdue else 0.0
        place = bisect.bisect_left(self.in_time, (request.first_token_by_s, math.inf))
        # Most come last. The shorter part is added up.
        if 2 * place > len(self.in_time):
            return self.work - overdue - _work_of(self.in_time[place:]), overdue
        return _work_of(self.in_time[:place]), overdue

    def _put_behind(self, now_s: float) -> None:
        """Puts what is overdue by now behind the others."""
        while self._becoming and self._becoming[0][0] <= now_s:
            _, _, entry = heapq.heappop(self._becoming)
            if (place := _place_of(entry, self.in_time)) is not None:
                del self.in_time[place]
                bisect.insort(self.overdue, entry)
                self._overdue_work += entry[2].line_work


# By class, the tenants that have something waiting.
Lines = Mapping[ServiceClass, Mapping[str, TenantLine]]


class WaitingRequests:
    """All that wait, and when their time is over."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._all: dict[str, InFlightRequest] = {}  # as they came
        self._moved: dict[str, InFlightRequest] = {}
        # They have lost engines before, and wait for one without another suspect.
        self._suspects: dict[str, InFlightRequest] = {}
        self._resumed: dict[str, InFlightRequest] = {}  # those that have emitted something
        self._lines: dict[ServiceClass, dict[str, TenantLine]] = {each: {} for each in ServiceClass}
        self._entries: dict[str, _Entry] = {}  # of those in a line
        self._deadlines: list[_Entry] = []  # a heap; some have gone
        self._numbers = itertools.count()
        self._moved_work = 0.0
        self.num_tokens = 0  # that have to be computed for all of them

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(self._all.values())

    def __contains__(self, request: InFlightRequest) -> bool:
        return self._all.get(request.request_id) is request

    @property
    def lines(self) -> Lines:
        """The lines of tenants, by class."""
        return self._lines

    @property
    def work_before_lines(self) -> float:
        """The work of those that go before all lines."""
        return self._moved_work if self._moved or self._suspects else 0.0

    @property
    def num_lines(self) -> int:
        """The number of tenants' lines, and one more if something goes before all."""
        return sum(map(len, self._lines.values())) + bool(self._moved or self._suspects)

    def wanted(self, tpot_s: float | None = None) -> RoomWanted:
        """Returns what waits, with the lines whose turns come first, and the objective to keep."""
        lines = itertools.islice(self._lines_in_turn(), _MOST_LINES_TOLD)
        return RoomWanted(len(self._all), self.num_tokens, list(lines), tpot_s)

    def _lines_in_turn(self) -> Iterator[WaitingLine]:
        first = [*self._moved.values(), *self._suspects.values()]
        if first:
            num_tokens = sum(request.num_tokens for request in first)
            yield WaitingLine(BEFORE_ALL_CLASSES, "", 1.0, len(first), num_tokens, 0.0)
        for service_class, lines in self._lines.items():

            def had(tenant: str, of_class: ServiceClass = service_class) -> float:
                return self._shares.had((of_class, tenant))

            for tenant in heapq.nsmallest(_MOST_LINES_TOLD, lines, key=had):
                line = lines[tenant]
                yield WaitingLine(
                    int(service_class), tenant, line.weight, len(line), line.num_tokens, line.work
                )

    def work_ahead(self, request: InFlightRequest) -> tuple[float, float]:
        """Returns the work in a newcomer's tenant's line: due before it in time, and overdue."""
        line = self._lines[request.service_class].get(request.tenant)
        return (0.0, 0.0) if line is None else line.work_ahead(request)

    @property
    def num_before_batch(self) -> int:
        """The number of those that go before batch work."""
        batch = self._lines[ServiceClass.BATCH]
        return len(self._all) - (sum(map(len, batch.values())) if batch else 0)

    def num_of_class(self) -> dict[ServiceClass, int]:
        """Returns how many wait of each class; those before all lines are of their own class."""
        counts = {each: sum(map(len, self._lines[each].values())) for each in ServiceClass}
        for request in itertools.chain(self._moved.values(), self._suspects.values()):
            counts[request.service_class] += 1
        return counts

    def num_of_account(self) -> dict[Account, int]:
        """Returns how many are in the line of each tenant that has something waiting."""
        return {
            (service_class, tenant): len(line)
            for service_class, lines in self._lines.items()
            for tenant, line in lines.items()
        }

    def add(self, request: InFlightRequest) -> None:
        """Lets a request wait behind its like."""
        self._all[request.request_id] = request
        self.num_tokens += request.num_tokens
        number = next(self._numbers)
        if request.emitted:
            self._resumed[request.request_id] = request
        else:
            entry = request.first_token_by_s, number, request
            heapq.heappush(self._deadlines, entry)
        if (band := self._band_of(request)) is not None:
            if not self._moved and not self._suspects:
                self._moved_work = 0.0
            band[request.request_id] = request
            self._moved_work += request.line_work
            return
        lines = self._lines[request.service_class]
        line = lines.get(request.tenant)
        if line is None:
            others = ((request.service_class, tenant) for tenant in lines)
            self._shares.begins_to_wait(request.account, others)
            line = lines[request.tenant] = TenantLine(request.weight)
        due_s = -math.inf if request.attempt else request.first_token_by_s
        entry = self._entries[request.request_id] = due_s, number, request
        line.add(entry)

    def remove(self, request: InFlightRequest) -> None:
        """Forgets a request; one that does not wait is ignored."""
        if request not in self:
            return
        del self._all[request.request_id]
        self._forget_deadlines()
        self._resumed.pop(request.request_id, None)
        self.num_tokens -= request.num_tokens
        if (band := self._band_of(request)) is not None:
            del band[request.request_id]
            self._moved_work -= request.line_work
            return
        lines = self._lines[request.service_class]
        line = lines[request.tenant]
        line.remove(self._entries.pop(request.request_id))
        if not line:
            del lines[request.tenant]

    def has_turn(self, request: InFlightRequest) -> None:
        """Counts the turn of a request that waits, and is about to be given to an engine."""
        if (entry := self._entries.get(request.request_id)) is not None:
            self._lines[request.service_class][request.tenant].has_turn(entry)

    def clear(self) -> None:
        """Forgets all."""
        for request in list(self._all.values()):
            self.remove(request)
        self._deadlines.clear()

    def first_except(
        self, now_s: float, passed: Container[str] = (), shut: Container[Account] = ()
    ) -> InFlightRequest | None:
        """Returns who is next, of those whose ids are not in `passed`; `None` if there is none.

        `now_s` is of the loop. Lines in `shut` are left out. Of the tenants it is the one with the
        fewest passed, and then the one that has had least.
        """
        for request in itertools.chain(self._moved.values(), self._suspects.values()):
            if request.request_id not in passed:
                return request
        for service_class, lines in self._lines.items():
            best: InFlightRequest | None = None
            best_key = (0, 0.0)
            for tenant, line in lines.items():
                if (service_class, tenant) in shut:
                    continue
                for num_passed, request in enumerate(line.in_turn(now_s)):
                    if request.request_id in passed:
                        continue
                    key = (num_passed, self._shares.had(request.account))
                    if best is None or key < best_key:
                        best, best_key = request, key
                    break
            if best is not None:
                return best
        return None

    # -- since when, and until when --

    def since_s(self) -> float | None:
        """Since when the one waits that has waited longest, batch work aside; `None` if none."""
        if not self.num_before_batch:
            return None
        is_batch = ServiceClass.BATCH
        return _since_s(each for each in self._all.values() if each.service_class is not is_batch)

    def resumed_since_s(self, *, of_suspects: bool) -> float | None:
        """Since when the first waits of those that have emitted something, or of its suspects."""
        if not of_suspects:
            return _since_s(self._resumed.values())
        return _since_s(each for each in self._suspects.values() if each.emitted)

    def resumed(self) -> list[InFlightRequest]:
        """Those that have emitted something."""
        return list(self._resumed.values())

    def next_deadline_s(self) -> float | None:
        """When the first token of one that waits is due next; `None` if none has to come."""
        while self._deadlines and not self._waits_for_first_token(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def due(self, now_s: float) -> list[InFlightRequest]:
        """Returns those whose first token should have come by now."""
        due = []
        while (at_s := self.next_deadline_s()) is not None and at_s <= now_s:
            due.append(heapq.heappop(self._deadlines)[2])
        return due

    def _forget_deadlines(self) -> None:
        """Lets go of requests that wait no more, once they are most of the heap."""
        if len(self._deadlines) > _SPARE_DEADLINES + 2 * len(self._all):
            self._deadlines = [
                each for each in self._deadlines if self._waits_for_first_token(each[2])
            ]
            heapq.heapify(self._deadlines)

    def _waits_for_first_token(self, request: InFlightRequest) -> bool:
        return request in self and not request.emitted

    def _band_of(self, request: InFlightRequest) -> dict[str, InFlightRequest] | None:
        """Returns those before all lines that a request is one of; `None` if it is in a line."""
        if request.needs_isolation:
            return self._suspects
        is_batch = request.service_class is ServiceClass.BATCH
        return self._moved if request.attempt and not is_batch else None


def _place_of(entry: _Entry, entries: list[_Entry]) -> int | None:
    """Returns where one stands in a sorted list; `None` if it is not in it."""
    place = bisect.bisect_left(entries, entry)
    return place if place < len(entries) and entries[place] is entry else None


def _work_of(entries: Iterable[_Entry]) -> float:
    return sum(request.line_work for _, _, request in entries)


def _since_s(requests: Iterable[InFlightRequest]) -> float | None:
    first = next(iter(requests), None)
    return None if first is None else first.waiting_since_s or 0.0
