"""The engines of one version that are connected: what is known of them, and where a request goes.

Owns their connections, what they have cached, and who leaves room on them. Does not own requests
(`dispatcher`), nor the links themselves (`membership`).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from zlib import crc32

from serving.gateway.dispatch.choice.cache_index import CacheIndex
from serving.gateway.dispatch.choice.engine_table import any_of
from serving.gateway.dispatch.choice.few_engines import ConnectedEngines
from serving.gateway.dispatch.choice.popular import PopularBeginnings
from serving.gateway.dispatch.choice.routing import Route, Wish
from serving.gateway.dispatch.first_token_times import FirstTokenCosts
from serving.gateway.dispatch.known_room import KnownRoom, Need, ToldToLeave
from serving.gateway.dispatch.requests import EngineConnection, InFlightRequest
from serving.gateway.telemetry.request_telemetry import ModelTelemetry
from serving.link.messages import CacheDelta, CacheSnapshot, Room, RoomWanted


class EngineRoster:
    """The connections, by engine id, and the choice of one of them. Of one event loop."""

    def __init__(self, telemetry: ModelTelemetry) -> None:
        """Begins empty; `telemetry` knows how long answers lately were."""
        self.connections: dict[str, EngineConnection] = {}
        self.index = CacheIndex()
        self._telemetry = telemetry
        self._engines = ConnectedEngines()
        self._told_to_leave = ToldToLeave()
        self._popular = PopularBeginnings()
        # Kept up to date, because each request asks for them: how many take requests, and the sum
        # of the shares of prompts that engines lately had to compute.
        self._num_ready = 0
        self._ratios = 0.0

    # -- engines come, tell and go --

    def add(self, connection: EngineConnection) -> None:
        """Takes an engine in, and what it tells of its cache from now on."""
        engine_id, link = connection.engine_id, connection.link
        if link.tells_room:
            connection.room = KnownRoom()
        self.connections[engine_id] = connection
        self._count_anew()
        if link.cache_layout is not None:
            self.index.add_engine(engine_id, link.cache_layout)
            link.watch_cache(partial(self._take_cache, engine_id))
        self._engines.add(connection, is_known=link.cache_layout is not None)

    def remove(self, engine_id: str) -> EngineConnection | None:
        """Forgets an engine, and returns what it was; `None` if there is none of this id."""
        connection = self.connections.pop(engine_id, None)
        if connection is not None:
            self.index.remove_engine(engine_id)
            self._told_to_leave.forget(engine_id)
            self._engines.remove(engine_id)
            self._count_anew()
        return connection

    def drain(self, connection: EngineConnection) -> None:
        """Gives an engine no more requests."""
        connection.drains()
        self._count_anew()

    def tell_room(self, connection: EngineConnection, room: Room) -> None:
        """Takes in the room that an engine tells of."""
        if connection.room is not None:
            self._ratios -= connection.computed_ratio
            connection.tell_room(room)
            self._ratios += connection.computed_ratio
            self._told_to_leave.tell(connection.engine_id, room)

    def want_room(self, wanted: RoomWanted) -> None:
        """Tells all engines that know their room what waits for it."""
        for connection in self.connections.values():
            if connection.room is not None:
                connection.link.want_room(wanted)

    def clear(self) -> None:
        """Forgets all connections. They are closed by their owner."""
        for connection in self.connections.values():
            if connection.last_move is not None:
                connection.last_move.cancel()
        self.connections.clear()
        self._count_anew()

    async def call_all(self, method: str, args: bytes, timeout_s: float) -> list[bytes]:
        """Runs a rare operation on every engine."""
        links = [connection.link for connection in self.connections.values()]
        return await asyncio.gather(*(link.call(method, args, timeout_s) for link in links))

    def _count_anew(self) -> None:
        """Counts what is known of all, so that errors of a long sum end when engines change."""
        connections = self.connections.values()
        self._num_ready = sum(not each.is_draining for each in connections)
        self._ratios = sum(each.computed_ratio for each in connections)

    def _take_cache(self, engine_id: str, message: CacheSnapshot | CacheDelta) -> None:
        """Takes in what an engine tells of its cache."""
        if isinstance(message, CacheSnapshot):
            self.index.take_all(engine_id, message.keys, is_first=message.is_first)
        else:
            self.index.take_changes(engine_id, message.stored, message.removed)

    # -- all of them together --

    @property
    def num_ready(self) -> int:
        """The number of engines that take requests."""
        return self._num_ready

    @property
    def has_engine(self) -> bool:
        """True if a request could be given to one now."""
        return self._num_ready > 0

    @property
    def late_s(self) -> float:
        """How late this gateway is with what its engines send, in seconds; 0 without engines.

        A message to any of them and back takes as long: where only some are late, they are, or the
        network to them.
        """
        return min((each.link.late_s for each in self.connections.values()), default=0.0)

    @property
    def computed_ratio(self) -> float:
        """The share of prompt tokens that engines lately had to compute, 0 to 1."""
        return self._ratios / len(self.connections) if self.connections else 1.0

    def does_any_turn(self, now_s: float) -> bool:
        """Returns whether one is ready that does not stand still, as far as is known."""
        columns = self._engines.columns(now_s)
        return any_of(~columns.is_draining & ~columns.is_late)

    # -- the choice of one --

    def need(self, request: InFlightRequest) -> Need:
        """Returns what a request takes of one, if its output is as long as others' lately."""
        expected = self._telemetry.output_mean(request.service_class) or 0.0
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        return Need(request.num_tokens, max(0, round(expected) - len(request.emitted)))

    def first_token_costs(self, request: InFlightRequest, now_s: float) -> FirstTokenCosts | None:
        """Returns what a new request takes until its first token; `None` without a ready engine.

        `now_s` is of the event loop.
        """
        found = None if request.blocks is None else self.index.find(request.blocks)
        cached = None if found is None else found.num_cached
        return self._engines.least_costs(self.need(request), cached, now_s)

    def route(self, request: InFlightRequest, now_s: float) -> tuple[Route, Need]:
        """Returns where a request goes, and what it takes there. `now_s` is of the event loop."""
        need = self.need(request)
        found = None if request.blocks is None else self.index.find(request.blocks)
        cached, request.beginning, spread_tokens = None, None, 0
        if found is not None:
            cached, request.beginning = found.num_cached, found.beginning
            # Not by what has lost its engine: its client has waited already.
            if not request.attempt and self._popular.is_copy_wanted(found, len(self.connections)):
                spread_tokens = found.most
        wish = Wish(
            need,
            cached,
            request.needs_isolation,
            self._with_suspects() if request.needs_isolation else (),
            self._leaves_room(request),
            crc32(request.request_id.encode()),
            spread_tokens,
            was_on_engine=bool(request.attempt) and not request.is_batch,
        )
        route = self._engines.choose(wish, now_s)
        engine_id = route.engine_id or ""
        if cached is not None and engine_id in self.index.engine_ids:
            need = replace(need, num_cached=cached.get(engine_id, 0))
        return route, need

    def sent(self, request: InFlightRequest) -> None:
        """Takes in that a request went where `route` said."""
        self._popular.came(request.beginning)

    def first_with_room(self, requests: Sequence[InFlightRequest]) -> Sequence[InFlightRequest]:
        """Returns the first ones that engines have room for which do not drain."""
        rooms = [each.room for each in self.connections.values() if not each.is_draining]
        known = [KnownRoom.like(room) for room in rooms if room is not None]
        if len(known) < len(rooms):
            return requests  # one of them takes everything
        for number, request in enumerate(requests):
            need = self.need(request)
            free = next((room for room in known if room.has_room_for_moved(need)), None)
            if free is None:
                return requests[:number]
            free.sent(need)
        return requests

    def _with_suspects(self) -> set[str]:
        """Returns the engines that have a suspect. All requests are looked through for it."""
        return {
            connection.engine_id
            for connection in self.connections.values()
            if any(request.is_isolated for request in connection.requests.values())
        }

    def _leaves_room(self, request: InFlightRequest) -> bool:
        """Returns whether some room is kept from it, because engines keep it for others.

        What has lost its engine has a client whose answer stands still; batch work can wait.
        """
        can_wait = not request.attempt or request.is_batch
        return can_wait and self._told_to_leave.has(request.account)
