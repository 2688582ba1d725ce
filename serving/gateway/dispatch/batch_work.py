"""Which batch work leaves its engine for work that cannot wait. Pure; `dispatcher` acts."""

import heapq
from collections.abc import Iterable, Mapping

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.requests import EngineConnection, InFlightRequest

# So often a request leaves its engine for others: each time it has to be prefilled again.
_MOST_YIELDS = 3


class BatchWork:
    """The requests of batch work that are on engines of one version."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlightRequest] = {}  # the newest last
        self._of_others: dict[str, int] = {}  # by engine, where there is some

    def __len__(self) -> int:
        return len(self._requests)

    def began(self, request: InFlightRequest) -> None:
        """Notes a request that was given to an engine; one that is no batch work is ignored."""
        if request.service_class is ServiceClass.BATCH:
            self._requests[request.request_id] = request

    def left(self, request: InFlightRequest) -> None:
        """Notes that a request has left its engine, if it was on one."""
        self._requests.pop(request.request_id, None)

    def tell(self, engine_id: str, num_of_others: int) -> None:
        """Takes in how much batch work of other gateways an engine has."""
        if num_of_others:
            self._of_others[engine_id] = num_of_others
        else:
            self._of_others.pop(engine_id, None)

    def clear(self) -> None:
        """Forgets all."""
        self._requests.clear()
        self._of_others.clear()

    def to_yield(
        self, num_waiting: int, connections: Mapping[str, EngineConnection]
    ) -> Iterable[InFlightRequest]:
        """Returns what leaves for `num_waiting` others without room: the newest, one for each.

        An engine has to tell of the room that it has then before more leaves it.
        """
        if not self._requests or not num_waiting:
            return ()
        yielding = {name for name, each in connections.items() if each.is_making_way}
        leaving: list[InFlightRequest] = []
        for request in reversed(self._requests.values()):
            if len(yielding) >= num_waiting:
                break
            engine_id = request.engine_id or ""
            connection = connections.get(engine_id)
            # What leaves one that drains makes room for nobody.
            if connection is None or connection.is_draining or engine_id in yielding:
                continue
            if may_yield(request):
                yielding.add(engine_id)
                leaving.append(request)
        return leaving

    def to_ask(
        self, num_waiting: int, connections: Mapping[str, EngineConnection]
    ) -> Iterable[EngineConnection]:
        """Returns the engines to ask for places of other gateways' batch work.

        As many as are missing when what leaves by itself has left; those with the most first.
        """
        if not self._of_others or not num_waiting:
            return ()
        num_missing = num_waiting - sum(each.is_making_way for each in connections.values())
        able = [
            (num, engine_id)
            for engine_id, num in self._of_others.items()
            if (each := connections.get(engine_id)) is not None
            and not (each.is_draining or each.is_making_way)
        ]
        return [connections[name] for _, name in heapq.nlargest(num_missing, able)]


def may_yield(request: InFlightRequest) -> bool:
    """Returns whether a request may leave its engine for others."""
    is_whole = not request.emitted or request.is_resumable
    return is_whole and not request.is_isolated and request.num_yields < _MOST_YIELDS
