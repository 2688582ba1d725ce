"""Allocates free slices to the replicas that ask, one after the other.

Owns the pending grants and the quarantine, for the life of this directory. Observes the nodes no
more than twice a second, however many replicas wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serving.directory.pending_grants import Grant, PendingGrants
from serving.directory.quarantine import Quarantine
from serving.domain.inventory import ObservedHost, Slice, SliceRequest, match_slices

logger = logging.getLogger(__name__)

_OBSERVE_PERIOD_S = 0.5


class SliceAllocator:
    """Grants slices to replicas. `observe` returns the present hosts. Used from one event loop."""

    def __init__(self, observe: Callable[[], Awaitable[list[ObservedHost]]]) -> None:
        self._observe = observe
        self._grants = PendingGrants()
        self._quarantine = Quarantine()
        self._observed: tuple[ObservedHost, ...] = ()
        self._observed_at_s = float("-inf")
        self._observing = asyncio.Lock()

    async def acquire(
        self,
        replica_id: str,
        request: SliceRequest,
        excluded: frozenset[frozenset[str]],
        timeout_s: float,
    ) -> Grant:
        """Grants free slices to this replica alone, as soon as there are as many as it requests.

        After `timeout_s` it returns none, with the reason. `excluded` are the node ids of slices
        that the replica could not reserve a moment ago.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            hosts = await self._hosts()
            grant = self._grants.grant(
                replica_id,
                match_slices(hosts, request),
                loop.time(),
                self._quarantined_until_s,
                num_slices=request.num_slices,
                excluded=excluded,
            )
            if grant.slices or loop.time() + _OBSERVE_PERIOD_S > deadline_s:
                return grant
            await asyncio.sleep(_OBSERVE_PERIOD_S)

    def quarantine(self, whole: Slice, suspects: frozenset[str], reason: str) -> None:
        """Keeps replicas off a slice that failed; `suspects`: node ids of the hosts to blame."""
        now_s = asyncio.get_running_loop().time()
        until_s = self._quarantine.note_failure(
            whole.name, whole.node_ids, now_s, suspects=suspects
        )
        logger.warning(
            "slice_quarantined slice=%s for_s=%.0f reason=%r", whole.name, until_s - now_s, reason
        )

    def clear_quarantine(self, slice_name: str) -> None:
        """Forgets the failures of a slice that serves now."""
        self._quarantine.note_success(slice_name)

    def _quarantined_until_s(self, whole: Slice) -> float | None:
        now_s = asyncio.get_running_loop().time()
        return self._quarantine.quarantined_until_s(whole.node_ids, now_s)

    async def _hosts(self) -> tuple[ObservedHost, ...]:
        loop = asyncio.get_running_loop()
        async with self._observing:
            if loop.time() - self._observed_at_s >= _OBSERVE_PERIOD_S:
                self._observed = tuple(await self._observe())
                self._observed_at_s = loop.time()
            return self._observed
