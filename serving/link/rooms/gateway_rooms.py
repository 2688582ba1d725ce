"""The room of one engine, as its gateways know it.

Owns what each gateway has sent and wants to send, what it was told, and when it has to hear. Does
not own the requests, nor sends anything (`server`). Pure: no clock, no I/O.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

from serving.domain.capacity.step_places import PLACES_SHARE, Places, StepSums
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.link.messages import EngineLoad, Room, RoomWanted
from serving.link.rooms.dealing import DealingOrder, Name, Share, deal
from serving.link.rooms.room import EngineCapacity, FreeRoom, free_room
from serving.link.rooms.turns import ChargedRequest, EngineAccount, TenantTurns
from serving.link.rooms.ways import Ways

# What has changed by so much besides what a gateway has sent itself, it hears at once: prompt
# tokens in line, and sequences. It would else choose this engine by what was there at the last step
# with a request of its own, or at the last heartbeat, a quarter of a second ago. Of 64 engines
# behind sixteen gateways the slowest hundredth's first token came after 0.24 in place of 0.44 s,
# with this and one drawn of those that are as good (docs/results/dispatch.md).
_NEWS_TOKENS, _NEWS_SEQUENCES = 512, 4
# An engine that has had nothing but batch work for so many seconds keeps no objective: batch work
# has none, and gives more tokens without.
_ALONE_S = 60.0


@dataclass(slots=True)
class _Part:
    """What one gateway has sent, wants to send, and was told.

    Since it was told it has sent `new_sequences` with `new_tokens`.
    """

    num_taken: int = 0
    new_tokens: int = 0
    new_sequences: int = 0
    demand: RoomWanted = field(default_factory=RoomWanted)
    share: Share = field(default_factory=lambda: Share(0, 0, 0))
    told: Room | None = None

    @property
    def num_left(self) -> int:
        """The requests that it may still send, by what it was told last."""
        if self.told is None:
            return 0
        return self.told.num_requests - (self.num_taken - self.told.num_taken)

    @property
    def has_news(self) -> bool:
        """True if it was told nothing yet, or much else than there is for it now."""
        if self.told is None:
            return True
        left, now = self.num_left, self.share.sequences
        left_for_all, now_for_all = left - self.told.num_for_moved, now - self.share.for_moved
        return self._is_news(left, now) or self._is_news(left_for_all, now_for_all)

    def _is_news(self, left: int, now: int) -> bool:
        """Returns whether it has to hear that `now` it may send so many where `left` it thinks."""
        if now > left:
            return left <= 0 or self.demand.num_requests > left
        return left > max(1, now)

    @property
    def accounts(self) -> list[EngineAccount]:
        """Those that have something waiting there, as far as it has told."""
        return [(line.service_class, line.tenant) for line in self.demand.lines]


class GatewayRooms(Generic[Name]):
    """The parts of all gateways. Used from one event loop; `now_s` is of its clock."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self._capacity = capacity
        self._places = Places(capacity.max_num_seqs)
        self._parts: dict[Name, _Part] = {}
        self._turns = TenantTurns()
        self._ways: Ways[Name] = Ways()
        self._free = FreeRoom(0, 0, 0)
        self._load = EngineLoad()
        self._num_sequences = 0
        self._num_urgent = 0  # requests that are no batch work, and are on the engine
        self._last_urgent_s = -math.inf
        self._num_looks = 0
        self._is_batch_leaving = False
        self._leaving: list[EngineAccount] = []

    def opened(self, gateway: Name) -> None:
        """Notes a gateway that has been told nothing yet."""
        self._parts[gateway] = _Part()

    def left(self, gateway: Name, now_s: float) -> None:
        """Forgets a gateway."""
        self._parts.pop(gateway, None)
        self._ways.left(gateway)
        self._see_who_waits(now_s)

    def took(self, gateway: Name, num_tokens: int) -> None:
        """Counts a request of so many tokens from a gateway, whatever becomes of it."""
        part = self._parts[gateway]
        part.num_taken += 1
        part.new_tokens += num_tokens
        part.new_sequences += 1

    def began(self, gateway: Name, request_id: str, request: ChargedRequest, now_s: float) -> None:
        """Charges the tenant of a request that the engine has taken from a gateway."""
        self._turns.charge(request, now_s)
        if request.account[0] == ServiceClass.BATCH:
            self._ways.began(request_id, gateway)
        else:
            self._num_urgent += 1
            self._last_urgent_s = now_s

    def ended(self, request_id: str, request: ChargedRequest) -> None:
        """Puts right what was charged for a request that has begun and is over."""
        self._turns.settle(request)
        self._ways.ended(request_id)
        self._num_urgent -= request.account[0] != ServiceClass.BATCH

    def ask_for_a_way(self, gateway: Name, now_s: float) -> None:
        """Asks batch work of another gateway back."""
        self._ways.ask(gateway, now_s)

    def wanted(self, gateway: Name, demand: RoomWanted, now_s: float) -> None:
        """Notes what waits at a gateway."""
        self._parts[gateway].demand = demand
        self._see_who_waits(now_s)

    def stepped(self, done: StepSums, now_s: float) -> None:
        """Bounds the sequences by what the engine has done since the last time.

        Of gateways that tell other objectives the strictest counts. Without one nothing is bounded,
        nor is an engine that has had nothing but batch work for a while.
        """
        most, tpot_s = self._capacity.max_num_seqs, self._tpot_s
        if self._num_urgent:
            self._last_urgent_s = now_s
        if tpot_s is None or now_s - self._last_urgent_s >= _ALONE_S:
            self._places = Places(most)
        else:
            token_s = PLACES_SHARE * tpot_s
            self._places = self._places.after(done, now_s, most=most, token_s=token_s)

    @property
    def num_places(self) -> int:
        """How many sequences the engine may have; what was on another one before may have more."""
        return self._places.num

    @property
    def _tpot_s(self) -> float | None:
        told = (part.demand.tpot_s for part in self._parts.values())
        return min((each for each in told if each is not None), default=None)

    def look(self, load: EngineLoad, num_sequences: int, now_s: float) -> None:
        """Deals out what there is now."""
        self._load, self._num_sequences = load, num_sequences
        self._is_batch_leaving = self._turns.is_batch_leaving(now_s)
        self._leaving = self._turns.leaving(now_s)
        self._free = free_room(self._capacity, load, num_sequences, self._places.num)
        self._num_looks += 1
        self._ways.look(now_s)
        order = DealingOrder.of(
            self._capacity,
            self._places.num,
            self._turns.had,
            partial(self._turns.leaves_room, now_s=now_s),
            self._num_looks,
        )
        demands = {gateway: part.demand for gateway, part in self._parts.items()}
        for gateway, share in deal(self._free, demands, load.computed_ratio, order).items():
            self._parts[gateway].share = share

    def room_of(self, gateway: Name) -> Room:
        """Returns what to tell a gateway, and counts it as told."""
        part = self._parts[gateway]
        part.new_tokens = part.new_sequences = 0
        part.told = Room(
            num_taken=part.num_taken,
            num_requests=part.share.sequences,
            prefill_tokens=part.share.prefill_tokens,
            kv_tokens=self._free.kv_tokens,
            num_sequences=self._num_sequences,
            backlog_tokens=self._load.backlog_tokens,
            computed_ratio=self._load.computed_ratio,
            num_places=max(0, self._free.sequences),
            num_dealt=part.share.dealt,
            is_batch_leaving=self._is_batch_leaving,
            leaving=self._leaving,
            to_yield=self._ways.to_yield(gateway),
            num_batch_of_others=self._ways.num_of_others(gateway),
            num_ways_over=self._ways.num_over(gateway),
            num_for_moved=part.share.for_moved,
        )
        return part.told

    @property
    def to_tell(self) -> list[Name]:
        """The gateways that have to hear at once: all others hear with the next step or heartbeat.

        They are those that were told nothing yet, that may send no more and now can, that want
        more and get it, that hold a promise of more than there is for them by now, that believe
        much less or more to be there than is, or that are to take batch work back.
        """
        return [
            gateway
            for gateway, part in self._parts.items()
            if part.has_news or self._is_mistaken(part) or self._is_asked_anew(gateway, part)
        ]

    def _is_mistaken(self, part: _Part) -> bool:
        """Returns whether a gateway believes much less, or more, to be there than is.

        Where something waits it asks, and hears when its part changes: told besides of each change
        of the line, those beside a flood of long prompts waited three times as long (p90).
        """
        if part.told is None or part.demand.num_requests:
            return False
        sent = round(part.new_tokens * self._load.computed_ratio)
        tokens = self._load.backlog_tokens - part.told.backlog_tokens - sent
        sequences = self._num_sequences - part.told.num_sequences - part.new_sequences
        return abs(tokens) >= _NEWS_TOKENS or abs(sequences) >= _NEWS_SEQUENCES

    def _is_asked_anew(self, gateway: Name, part: _Part) -> bool:
        told = () if part.told is None else part.told.to_yield
        return any(request_id not in told for request_id in self._ways.to_yield(gateway))

    def _see_who_waits(self, now_s: float) -> None:
        waiting = {account for part in self._parts.values() for account in part.accounts}
        self._turns.wait(waiting, now_s)
