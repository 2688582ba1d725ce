"""Allocates free slices to the replicas that ask: all at once, the oldest wish first.

Owns those who wait and the pending grants, for the life of this directory. Used from one event
loop. Does not look by itself: whoever looks calls `decide` afterwards.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from serving.directory.pending_grants import Grant, PendingGrants, SliceWish
from serving.domain.inventory import SliceRequest
from serving.domain.supply.found import SliceMatches


@dataclass(slots=True)
class _Asker:
    wish: SliceWish
    answer: asyncio.Future[Grant]
    # The last reason why it got nothing.
    refused: Grant = field(default_factory=lambda: Grant((), "nobody has looked yet"))


class SliceAllocator:
    """Grants slices to replicas. `has_askers` is set while somebody waits."""

    def __init__(self) -> None:
        self._grants = PendingGrants()
        self._askers: dict[str, _Asker] = {}
        self.has_askers = asyncio.Event()

    async def acquire(self, wish: SliceWish, timeout_s: float) -> Grant:
        """Grants free slices to this replica alone, as soon as there are as many as it requests.

        After `timeout_s` it returns none, with the reason. A replica that asks again takes the
        place of its earlier call.
        """
        asker = _Asker(wish, asyncio.get_running_loop().create_future())
        self._askers[wish.replica_id] = asker
        self.has_askers.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await asker.answer
        except TimeoutError:
            return asker.refused
        finally:
            if self._askers.get(wish.replica_id) is asker:
                del self._askers[wish.replica_id]
            if not self._askers:
                self.has_askers.clear()

    def decide(
        self,
        match: Callable[[SliceRequest], SliceMatches],
        failed_at_s: Mapping[frozenset[str], float],
        now_s: float,
    ) -> None:
        """Answers everybody who can have slices now; `now_s` is monotonic."""
        found: dict[SliceRequest, SliceMatches] = {}

        def match_once(request: SliceRequest) -> SliceMatches:
            if request not in found:
                found[request] = match(request)
            return found[request]

        wishes = [asker.wish for asker in self._askers.values() if not asker.answer.done()]
        for replica_id, grant in self._grants.share(wishes, match_once, now_s, failed_at_s).items():
            asker = self._askers[replica_id]
            if grant.slices:
                asker.answer.set_result(grant)
            else:
                asker.refused = grant
