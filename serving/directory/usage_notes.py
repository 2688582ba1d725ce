"""What tenants have used, kept for all gateways by the directory, and for the one after this.

Owns the calls of Ray's key-value store and when they are made. `domain.usage.usage_report` adds up.
"""

import asyncio
import logging
import time

import msgspec
from ray.experimental import internal_kv

from serving.domain.supply.keys import SupplyKeys
from serving.domain.usage.usage_report import StoredUsage, UsageKeeper, UsageReport

logger = logging.getLogger(__name__)

# What gateways that are gone meanwhile had counted since the last time is lost with a directory.
WRITE_PERIOD_S = 5.0


class UsageNotes:
    """The keeper of one application's usage."""

    def __init__(self, epoch: str, keys: SupplyKeys) -> None:
        """Makes an empty one; no other directory has its `epoch`."""
        self._key = keys.usage
        self._keeper = UsageKeeper(epoch)
        self._written = b""
        self._decoder = msgspec.msgpack.Decoder(UsageReport)

    async def read(self) -> None:
        """Begins with what the directory before has written; without it if that is unreadable."""
        try:
            text: bytes | None = await asyncio.to_thread(internal_kv._internal_kv_get, self._key)
            if text is not None:
                self._keeper.begin_with(msgspec.msgpack.decode(text, type=StoredUsage))
        except msgspec.MsgspecError as error:
            logger.warning("usage_not_read error=%r", error)

    def take(self, encoded: bytes) -> bytes:
        """Takes a gateway's report; returns the answer.

        Raises:
            ValueError: the gateway is of another build.
        """
        return msgspec.msgpack.encode(self._keeper.take(self._decoder.decode(encoded), time.time()))

    async def keep_written(self) -> None:
        """Writes what has changed, until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_PERIOD_S)
            text = msgspec.msgpack.encode(self._keeper.stored())
            if text == self._written:
                continue
            try:
                await asyncio.to_thread(
                    internal_kv._internal_kv_put, self._key, text, overwrite=True
                )
                self._written = text
            except Exception as error:  # noqa: BLE001 - whatever ails the head, it is tried again
                logger.warning("usage_not_written error=%r", error)
