"""The requests of one version that wait: who is next, and who is told to come back later.

Owns their order, the turns of tenants, what is known of how long they wait, and their deadlines.
Does not own a request that has an engine (`dispatcher`), nor the choice of one (`choice`).
"""

import asyncio
from typing import Protocol

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.usage.tenant_shares import TenantShares, work_of
from serving.gateway.dispatch.admission import AdmissionQueue
from serving.gateway.dispatch.choice.engine_roster import EngineRoster
from serving.gateway.dispatch.choice.routing import choice_of
from serving.gateway.dispatch.deadlines import Deadlines
from serving.gateway.dispatch.demand import DemandTeller
from serving.gateway.dispatch.first_token_times import FirstTokenTimes, RecentFirstTokens
from serving.gateway.dispatch.forecast import Capacity, LineForecast
from serving.gateway.dispatch.full_time import FullTime
from serving.gateway.dispatch.known_room import Need
from serving.gateway.dispatch.requests import Account, EngineConnection, InFlightRequest
from serving.gateway.dispatch.waiting import WaitingRequests
from serving.gateway.telemetry.request_story import Because, EngineChoice

# So many of those that wait first are looked at for one that an engine has room for: the others
# would overtake too many.
_MAX_PASSED = 16
# So many may wait for an engine that has more of them cached, and be overtaken meanwhile.
_MOST_AWAITING = 64
_MOST_SHUT = 16  # lines that are passed over, because what is left is kept for others


class LineOwner(Protocol):
    """What is done with requests that leave the line; the dispatcher does."""

    def give(
        self,
        request: InFlightRequest,
        connection: EngineConnection,
        need: Need,
        choice: EngineChoice,
    ) -> None:
        """Sends a request to the engine that was chosen for it. It waits no more."""
        ...

    def make_way(self, num_waiting: int) -> None:
        """Has batch work leave engines for so many that cannot wait and found no room."""
        ...

    def end_waiting(self, request: InFlightRequest) -> None:
        """Fails a request that has waited as long as it may. It waits no more."""
        ...


class RequestLine:
    """Those that wait for an engine of one version. Used from one event loop."""

    def __init__(self, queue: AdmissionQueue, engines: EngineRoster, owner: LineOwner) -> None:
        """Makes an empty one. `queue` is that of the model, whose telemetry and limits count."""
        self._queue = queue
        self._telemetry = queue.telemetry
        self._engines = engines
        self._owner = owner
        self._shares = TenantShares()
        self._waiting = WaitingRequests(self._shares)
        self._forecast = LineForecast(self._waiting)
        self.first_tokens = RecentFirstTokens()
        self._why_waiting = ""  # of the last one that found no engine
        self._are_full = False  # no engine takes another request, whatever it needs
        self._is_short = False  # nor one that is no batch work, and waits
        self._full_time = FullTime()
        self._demand = DemandTeller(self._waiting, engines.want_room, lambda: self._tpot_s)
        self._deadlines = Deadlines(
            self._waiting,
            queue.limits.request_deadline_s,
            has_engine=lambda: engines.has_engine,
            on_over=self._end_waiting,
        )

    # -- what is known of it --

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    @property
    def num_of_class(self) -> dict[ServiceClass, int]:
        """The number of those that wait, by class."""
        return self._waiting.num_of_class()

    @property
    def num_of_account(self) -> dict[Account, int]:
        """The number of those that wait for their tenants' turns, by class and tenant."""
        return self._waiting.num_of_account()

    @property
    def num_promised(self) -> int:
        """The number of refused requests that were told when to come back, and have not yet."""
        return self._forecast.num_promised(asyncio.get_running_loop().time())

    def full_ratio(self, now_s: float) -> float:
        """Returns the share of the last half minute in which engines were full and work waited.

        Batch work aside; 0 to 1. `now_s` is monotonic.
        """
        return self._full_time.ratio(now_s)

    def since_s(self) -> float | None:
        """Since when the one waits that has waited longest, batch work aside; `None` if none."""
        return self._waiting.since_s()

    def wait_s(self, request: InFlightRequest) -> float | None:
        """Returns how long a request still waits, as far as is known; `None` if nothing is."""
        return self._forecast.wait_s(request, self._capacity, asyncio.get_running_loop().time())

    def come_back_in_s(self, request: InFlightRequest, now_s: float) -> float | None:
        """Returns when a new request is to come back, because it would wait for too long.

        `None`: it is taken. `now_s` is of the event loop.

        Raises:
            DeadlineTooShortError: no engine makes its first token in its time.
        """
        request.line_work = self._line_work(request)

        def to_first() -> FirstTokenTimes:
            costs = self._engines.first_token_costs(request, now_s)
            return FirstTokenTimes() if costs is None else self.first_tokens.times(costs, now_s)

        return self._forecast.come_back_in_s(
            request, self._capacity, now_s, to_first, self.first_tokens.longest_s
        )

    # -- engines and requests come and go --

    def engine_came(self, connection: EngineConnection) -> None:
        """Tells a new engine what waits for it, and what it is to keep to."""
        if connection.room is not None and (self._waiting or self._tpot_s is not None):
            connection.link.want_room(self._demand.now())

    def objectives_changed(self) -> None:
        """Tells engines of the objectives that they are to keep to from now on."""
        self._engines.want_room(self._demand.now())

    def engine_went(self) -> None:
        """Minds the deadlines of what may have no engine now."""
        self._deadlines.engine_went()

    def arm(self) -> None:
        """Minds the deadlines as they are now."""
        self._deadlines.arm()

    def enter(self, request: InFlightRequest) -> None:
        """Gives a request to an engine, or lets it wait behind those that came before it."""
        request.engine_id = None
        if request.waiting_since_s is None:
            request.waiting_since_s = asyncio.get_running_loop().time()
        self._waiting.add(request)
        self.serve()
        if request in self._waiting:
            request.telemetry.queued(self._why_waiting)
            self._deadlines.arm()

    def serve(self) -> None:
        """Gives those that wait to engines, the first ones first, as far as there is room."""
        passed: set[str] = set()
        shut: set[Account] = set()
        num_passed = 0
        self._are_full = self._is_short = False
        now_s = asyncio.get_running_loop().time()
        while (request := self._waiting.first_except(now_s, passed, shut)) is not None:
            route, need = self._engines.route(request, now_s)
            if route.engine_id is not None and route.because is not None:
                connection = self._engines.connections[route.engine_id]
                num_engines = len(self._engines.connections)
                has_waited = request.awaited_id == route.engine_id
                because = Because.WAITED if has_waited else route.because
                choice = choice_of(connection, need, because, num_engines)
                request.first_token_cost = route.first_token_cost
                self._leave(request, connection, need)
                self._owner.give(request, connection, need, choice)
                continue
            self._why_waiting = route.why_waiting
            request.awaited_id = route.awaited_id
            self._are_full = route.is_kept or not route.is_open_to_others
            self._is_short |= not (route.is_open_to_others or request.is_batch)
            if route.is_kept and len(shut) < _MOST_SHUT:
                shut.add(request.account)
                continue
            passed.add(request.request_id)
            num_passed += not (request.needs_isolation or route.awaited_id)
            is_enough = num_passed >= _MAX_PASSED or len(passed) >= _MOST_AWAITING
            if not route.is_open_to_others or is_enough:
                break
        self._owner.make_way(self._waiting.num_before_batch)
        self.look()

    def remove(self, request: InFlightRequest) -> None:
        """Takes a request out, if it waits. `look` has to follow."""
        self._waiting.remove(request)

    def look(self) -> None:
        """Takes in what waits now, and tells engines of it."""
        is_measured = self._are_full and self._waiting and self._are_lengths_known
        num_full = self._engines.num_ready if is_measured else 0
        now_s = asyncio.get_running_loop().time()
        self._forecast.rate.look(now_s, num_full)
        num_urgent = self._waiting.num_before_batch
        is_short = self._is_short and self._engines.has_engine and num_urgent > 0
        self._full_time.look(now_s, is_full=is_short)
        self._demand.look()

    def settle(self, request: InFlightRequest) -> None:
        """Puts right what was charged for a request that is over."""
        if request.charged is not None:
            computed = len(request.prompt_token_ids) - request.num_cached
            less = request.charged - work_of(computed, len(request.emitted))
            self._shares.settle(request.account, less, request.weight)

    def stop(self) -> None:
        """Forgets everything."""
        self._deadlines.stop()
        self._demand.stop()
        self._waiting.clear()

    # -- how it does so --

    @property
    def _capacity(self) -> Capacity:
        return Capacity(self._engines.num_ready, self._queue.next_engine_in_s)

    @property
    def _tpot_s(self) -> float | None:
        held = self._telemetry.held_objectives
        return None if held is None else held.tpot_s

    @property
    def _are_lengths_known(self) -> bool:
        """Whether an answer has ended. Before the first, all of them count as if they had none."""
        return self._telemetry.output_mean(ServiceClass.STANDARD) is not None

    def _line_work(self, request: InFlightRequest) -> float:
        """Returns what a request counts in line, by what is known of lengths and caches now."""
        need = self._engines.need(request)
        return work_of(need.num_computed(self._engines.computed_ratio), need.num_expected)

    def _leave(self, request: InFlightRequest, connection: EngineConnection, need: Need) -> None:
        """Takes a request out that gets this engine, at the cost of its tenant."""
        now_s = asyncio.get_running_loop().time()
        self._waiting.has_turn(request)
        self._waiting.remove(request)
        if request.charged is None:  # once, for a move is nobody's fault
            computed = need.num_computed(connection.computed_ratio)
            request.charged = work_of(computed, need.num_expected)
            self._shares.has_turn(request.account, request.charged, request.weight)
        if (request.waiting_since_s or 0.0) < now_s and self._are_lengths_known:
            self._forecast.rate.took(request, self._line_work(request))
        request.waiting_since_s = request.awaited_id = None

    def _end_waiting(self, requests: list[InFlightRequest]) -> None:
        """Fails those that have waited as long as they may."""
        for request in requests:
            self._waiting.remove(request)
            self._owner.end_waiting(request)
        self.look()
