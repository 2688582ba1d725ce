"""Which beginnings many requests have, and whether more engines ought to have one. Pure.

An engine that alone has what a third of all requests begin with gets a third of all requests: each
by itself takes least there. So a beginning is to be on as many engines as its share of the requests
is worth of them. More copies take the place of what others begin with, and are not wanted.
"""

from collections import Counter, deque

from serving.gateway.dispatch.choice.cache_index import Found

# A share is that of so many requests, the last ones, and not known of fewer than these.
_NUM_REQUESTS, _LEAST_REQUESTS = 512, 64
# An engine has a beginning if it has so much of it.
_ENOUGH = 0.5


class PopularBeginnings:
    """The beginnings of a gateway's last requests, by the keys of their last blocks."""

    def __init__(self) -> None:
        self._last: deque[bytes | None] = deque()
        self._count: Counter[bytes | None] = Counter()

    def came(self, beginning: bytes | None) -> None:
        """Takes in a request that was sent; `None` if no engine had anything of it."""
        self._last.append(beginning)
        self._count[beginning] += 1
        if len(self._last) > _NUM_REQUESTS:
            gone = self._last.popleft()
            self._count[gone] -= 1
            if not self._count[gone]:
                del self._count[gone]

    def is_copy_wanted(self, found: Found, num_engines: int) -> bool:
        """Returns whether one engine more ought to have what was found of a request, of so many."""
        num_requests = len(self._last)
        worth = self._count[found.beginning] * num_engines
        # One has it.
        if found.beginning is None or num_requests < _LEAST_REQUESTS or worth <= num_requests:
            return False
        enough = _ENOUGH * found.most
        num_copies = sum(map(enough.__le__, found.num_cached.values()))
        return num_copies * num_requests < worth
