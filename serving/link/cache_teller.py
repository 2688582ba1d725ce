"""Tells gateways what an engine's prefix cache has: all of it at first, then what changes.

Owns who watches, and when they hear. Does not own the cache's contents (the engine's mirror of
them). The order is that of the link, so a gateway that takes in each message knows what was there
some 50 ms ago.
"""

import asyncio
from collections.abc import Callable

from serving.domain.tokens.cached_blocks import KEY_BYTES, CacheMirror, joined
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

    def watch(self, gateway: GatewayConnection) -> None:
        """Sends everything to a gateway now, and from now on what changes."""
        mirror = self._mirror()
        if mirror is None:
            return
        self._send_changes()
        keys = joined(mirror.keys)
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
            if mirror is not None and mirror.has_changes:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(_PERIOD_S, self._send_changes)

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
        if mirror is None or not mirror.has_changes:
            return
        delta = CacheDelta(*mirror.take_changes())
        for gateway in list(self._watchers):
            gateway.send(delta)
