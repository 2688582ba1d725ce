"""Tells gateways what an engine's prefix cache has: all of it at first, then what changes.

What requests in line will bring in counts as there until they end: a gateway that gets a prompt
with the same beginning then sends it to where another gateway has just sent one, and the beginning
is not computed once for each gateway.

Owns who watches, when they hear, and what requests will bring in. Does not own the cache's contents
(the engine's mirror of them). The order is that of the link, so a gateway that takes in each
message knows what was there some 50 ms ago.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from serving.domain.tokens.cached_blocks import KEY_BYTES, CacheMirror, joined, packed, split
from serving.link.gateway_connection import GatewayConnection
from serving.link.messages import CacheDelta, CacheSnapshot

# Changes are told together, at most so long after the first of them.
_PERIOD_S = 0.05
# A message of a snapshot takes a gateway some milliseconds.
_PART_BYTES = 32_768 * KEY_BYTES


class CacheTeller:
    """Sends what the cache has to the gateways that watch it. Used from one event loop."""

    def __init__(self, mirror: Callable[[], CacheMirror | None]) -> None:
        """Reads the cache through `mirror`, which stays the same one."""
        self._mirror = mirror
        self._watchers: set[GatewayConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._expected: dict[str, list[bytes]] = {}  # by request id
        self._num_expecting: Counter[bytes] = Counter()  # requests, by what they will bring in
        self._touched: set[bytes] = set()  # keys of theirs since gateways last heard

    def watch(self, gateway: GatewayConnection) -> None:
        """Sends everything to a gateway now, and from now on what changes."""
        mirror = self._mirror()
        if mirror is None:
            return
        self._send_changes()
        keys = joined(mirror.keys | self._num_expecting.keys())
        parts = [keys[at : at + _PART_BYTES] for at in range(0, len(keys), _PART_BYTES)]
        for number, part in enumerate(parts or [b""]):
            gateway.send(CacheSnapshot(part, is_first=number == 0))
        self._watchers.add(gateway)

    def left(self, gateway: GatewayConnection) -> None:
        """Forgets a gateway."""
        self._watchers.discard(gateway)

    def look(self) -> None:
        """Looks for changes, and has them told soon."""
        if self._timer is None:
            mirror = self._mirror()
            if mirror is not None and (mirror.has_changes or self._touched):
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(_PERIOD_S, self._send_changes)

    def came(self, request_id: str, expected_keys: bytes) -> None:
        """Takes in what a request will bring into the cache, and has it told soon.

        Raises:
            ValueError: the keys are not whole; the request is malformed.
        """
        mirror, keys = self._mirror(), list(split(expected_keys))
        if mirror is None or not keys:
            return
        self._expected[request_id] = keys
        for key in keys:
            if not self._num_expecting[key] and key not in mirror.keys:
                self._touched.add(key)
            self._num_expecting[key] += 1
        self.look()

    def ended(self, request_id: str) -> None:
        """Expects nothing of a request any more: it has brought it in by now, or never will."""
        for key in self._expected.pop(request_id, ()):
            self._num_expecting[key] -= 1
            if not self._num_expecting[key]:
                del self._num_expecting[key]
                self._touched.add(key)
        self.look()

    def stop(self) -> None:
        """Tells nothing any more."""
        self._watchers.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_changes(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        mirror = self._mirror()
        if mirror is None or not (mirror.has_changes or self._touched):
            return
        changes = mirror.take_changes()
        if self._touched or self._num_expecting:
            keys = self._touched.union(*map(split, changes))
            expected = self._num_expecting
            changes = packed({key: key in mirror.keys or key in expected for key in keys})
            self._touched.clear()
        delta = CacheDelta(*changes)
        for gateway in list(self._watchers):
            gateway.send(delta)
