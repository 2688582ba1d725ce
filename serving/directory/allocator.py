"""Gives out free slices to the replicas that ask, one after the other.

Owns the offers and the quarantine of this directory's life. Looks at the nodes no more than twice a
second, however many replicas wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serving.directory.claims import Claims, Offer
from serving.directory.quarantine import Quarantine
from serving.domain.inventory import ObservedHost, SliceWant, WholeSlice, survey

logger = logging.getLogger(__name__)

_LOOK_PERIOD_S = 0.5


class SliceClerk:
    """Answers claims. `look` says which hosts there are. Used from one event loop."""

    def __init__(self, look: Callable[[], Awaitable[list[ObservedHost]]]) -> None:
        self._look = look
        self._claims = Claims()
        self._quarantine = Quarantine()
        self._seen: tuple[ObservedHost, ...] = ()
        self._seen_at_s = float("-inf")
        self._looking = asyncio.Lock()

    async def claim(
        self,
        replica_id: str,
        want: SliceWant,
        tried: frozenset[frozenset[str]],
        timeout_s: float,
    ) -> Offer:
        """Free slices for this replica alone, as soon as there are as many as it wants.

        After `timeout_s` an answer without any, with the reason why. `tried` are node ids of
        slices that the replica could not reserve a moment ago.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            hosts = await self._hosts()
            offer = self._claims.offer(
                replica_id,
                survey(hosts, want),
                loop.time(),
                self._barred_until_s,
                num_slices=want.num_slices,
                tried=tried,
            )
            if offer.slices or loop.time() + _LOOK_PERIOD_S > deadline_s:
                return offer
            await asyncio.sleep(_LOOK_PERIOD_S)

    def quarantine(self, whole: WholeSlice, suspects: frozenset[str], reason: str) -> float:
        """Keeps everybody off a slice that failed; for how long, in seconds.

        `suspects` are the node ids of the hosts to blame.
        """
        now_s = asyncio.get_running_loop().time()
        until_s = self._quarantine.note_failure(
            whole.name, whole.node_ids, now_s, suspects=suspects
        )
        logger.warning(
            "slice_quarantined slice=%s for_s=%.0f reason=%r", whole.name, until_s - now_s, reason
        )
        return until_s - now_s

    def absolve(self, slice_name: str) -> None:
        """The slice serves: what it did before is forgotten."""
        self._quarantine.note_success(slice_name)

    def _barred_until_s(self, whole: WholeSlice) -> float | None:
        now_s = asyncio.get_running_loop().time()
        return self._quarantine.barred_until_s(whole.node_ids, now_s)

    async def _hosts(self) -> tuple[ObservedHost, ...]:
        loop = asyncio.get_running_loop()
        async with self._looking:
            if loop.time() - self._seen_at_s >= _LOOK_PERIOD_S:
                self._seen = tuple(await self._look())
                self._seen_at_s = loop.time()
            return self._seen
