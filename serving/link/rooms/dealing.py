"""Deals the room of an engine to its gateways, for the tenants whose turns come. Pure."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.link.messages import BEFORE_ALL_CLASSES, RoomWanted, WaitingLine
from serving.link.rooms.room import KEPT_PLACES, OPEN_LINE, EngineCapacity, FreeRoom
from serving.link.rooms.turns import EngineAccount

# Names a gateway: its connection, or anything else.
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Share:
    """One gateway's part of the room.

    Of its `sequences` so many were `dealt` to those that wait there; the others nobody has asked
    for. So many are `for_moved`: only requests that were on an engine before may have them.
    """

    sequences: int
    prefill_tokens: int
    dealt: int
    for_moved: int = 0


def _nothing(_: EngineAccount) -> float:
    return 0.0


def _nobody(_: EngineAccount) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class DealingOrder:
    """In what order places are dealt.

    Among tenants of a class the next is who `had` least; among gateways of one tenant, number
    `first` begins. Who `leaves_room` gets none of the last `kept_sequences`, nor any while no more
    than `kept_prefill` tokens are left of the line.
    """

    had: Callable[[EngineAccount], float] = _nothing
    leaves_room: Callable[[EngineAccount], bool] = _nobody
    first: int = 0
    kept_sequences: float = 0.0
    kept_prefill: float = 0.0

    @classmethod
    def of(
        cls,
        capacity: EngineCapacity,
        num_places: int,
        had: Callable[[EngineAccount], float],
        leaves_room: Callable[[EngineAccount], bool],
        first: int,
    ) -> "DealingOrder":
        """Returns the order at an engine of that capacity, with so many places for sequences."""
        kept_prefill = (1.0 - OPEN_LINE) * capacity.max_num_batched_tokens
        return cls(had, leaves_room, first, KEPT_PLACES * num_places, kept_prefill)

    def is_kept(self, sequences: int, prefill: int) -> bool:
        """Returns whether what is left is kept for others."""
        return sequences <= self.kept_sequences or prefill <= self.kept_prefill


@dataclass(slots=True)
class _Line(Generic[Name]):
    """What waits of one tenant at one gateway; `work_each` is by its weight."""

    gateway: Name
    num_left: int
    tokens_each: int
    work_each: float


def deal(
    free: FreeRoom,
    demands: Mapping[Name, RoomWanted],
    computed_ratio: float = 1.0,
    order: DealingOrder | None = None,
) -> dict[Name, Share]:
    """Deals the room out, one request after the other, to the tenants whose turns come.

    A place goes to a gateway at which something of the tenant waits, to each in turn; nobody gets
    more than it has use for. What is left is everybody's in equal parts, so that a request which
    comes next need not ask: one each, and so one a gateway too many, where less is left. Those who
    leave room have to ask.
    """
    order = order or DealingOrder()
    given = dict.fromkeys(demands, 0)
    given_to_moved = dict.fromkeys(demands, 0)
    tokens = dict.fromkeys(demands, 0)
    sequences, prefill, for_moved = free.sequences, free.prefill_tokens, free.for_moved
    turns = _Turns(_queues(demands, computed_ratio, order.first), order)
    while prefill > 0 and (sequences > 0 or (for_moved > 0 and turns.is_before_all)):
        line = turns.next_line(is_kept=order.is_kept(sequences, prefill))
        if line is None:
            break
        for_moved -= 1
        given[line.gateway] += 1
        given_to_moved[line.gateway] += sequences <= 0
        tokens[line.gateway] += line.tokens_each
        sequences -= 1
        prefill -= line.tokens_each
    rest = rest_tokens = 0
    if demands and sequences > 0 and prefill > 0:
        rest, rest_tokens = -(-sequences // len(demands)), -(-prefill // len(demands))
    return {
        name: Share(
            given[name] + rest, tokens[name] + rest_tokens, given[name], given_to_moved[name]
        )
        for name in demands
    }


# By account, and whether it is what a gateway has told no line of.
_Queues = dict[tuple[EngineAccount, bool], deque[_Line[Name]]]


class _Turns(Generic[Name]):
    """Those that are left of the lines, in the order of their turns."""

    def __init__(self, queues: _Queues[Name], order: DealingOrder) -> None:
        self._order = order
        # The number is another one for each, so that nothing behind it is compared.
        self._heap = [
            (account[0], math.inf if is_rest else order.had(account), number, account, queue)
            for number, ((account, is_rest), queue) in enumerate(queues.items())
        ]
        heapq.heapify(self._heap)

    @property
    def is_before_all(self) -> bool:
        """True if the next one goes before all lines."""
        return bool(self._heap) and self._heap[0][0] == BEFORE_ALL_CLASSES

    def next_line(self, *, is_kept: bool) -> _Line[Name] | None:
        """Returns the line whose turn is next, less by one now; `None` if none wants a place.

        If what is left `is_kept`, those who leave room have no turn any more.
        """
        heap = self._heap
        while heap and is_kept and self._order.leaves_room(heap[0][3]):
            heapq.heappop(heap)
        if not heap:
            return None
        service_class, had, number, account, queue = heap[0]
        line = queue.popleft()
        line.num_left -= 1
        if line.num_left > 0:
            queue.append(line)
        if queue:
            turn = (service_class, had + line.work_each, number, account, queue)
            heapq.heapreplace(heap, turn)
        else:
            heapq.heappop(heap)
        return line


def _queues(demands: Mapping[Name, RoomWanted], computed_ratio: float, first: int) -> _Queues[Name]:
    """Returns the lines of each account, one for each gateway that has some.

    What a gateway has told no line of comes after all of its class, unless it has told of none.
    """
    queues: _Queues[Name] = {}
    for name, demand in demands.items():
        rest = _rest_of(demand)
        for told in (*demand.lines, rest):
            if told.num_requests > 0:
                key = (told.service_class, told.tenant), told is rest and bool(demand.lines)
                tokens = round(told.prefill_tokens * computed_ratio / told.num_requests)
                work = told.work / (told.num_requests * told.weight)
                line = _Line(name, told.num_requests, tokens, work)
                queues.setdefault(key, deque()).append(line)
    for queue in queues.values():
        queue.rotate(-(first % len(queue)))
    return queues


def _rest_of(demand: RoomWanted) -> WaitingLine:
    """Returns what a gateway has told no line of; its work is that of its prompts."""
    told = demand.lines
    num_tokens = demand.prefill_tokens - sum(line.prefill_tokens for line in told)
    return WaitingLine(
        told[-1].service_class if told else int(ServiceClass.STANDARD),
        tenant="",
        weight=1.0,
        num_requests=demand.num_requests - sum(line.num_requests for line in told),
        prefill_tokens=num_tokens,
        work=float(num_tokens),
    )
