"""Notes of ready engines in Ray's own key-value store, for a directory that comes after this one.

A directory that starts reads them before its first replica asks. Whoever of them renews is alive;
the others are engines that have lost their replica. Owns the calls and the form.
"""

import asyncio
import logging
from collections.abc import Iterable

from pydantic import TypeAdapter, ValidationError
from ray.experimental import internal_kv

from serving.domain.slice_records import SliceRecord
from serving.domain.supply.keys import SupplyKeys

logger = logging.getLogger(__name__)

_RECORD = TypeAdapter(SliceRecord)


class EngineNotes:
    """The notes of one application, as they were last stored."""

    def __init__(self, keys: SupplyKeys) -> None:
        self._prefix = keys.engines
        self._stored: dict[str, bytes] = {}  # by replica id

    async def read(self) -> tuple[SliceRecord, ...]:
        """Returns the engines of which notes are left; none of another version's form."""
        return await asyncio.to_thread(self._read)

    async def write(self, records: Iterable[SliceRecord]) -> None:
        """Stores notes of the ready engines among `records`, and of no other."""
        noted = {
            record.replica_id: _RECORD.dump_json(record) for record in records if record.may_go_on
        }
        if noted != self._stored:
            await asyncio.to_thread(self._write, noted)

    def _read(self) -> tuple[SliceRecord, ...]:
        records = []
        for key in internal_kv._internal_kv_list(self._prefix):
            text: bytes | None = internal_kv._internal_kv_get(key)
            try:
                record = None if text is None else _RECORD.validate_json(text)
            except ValidationError as error:
                logger.warning("engine_note_not_read key=%r error=%r", key, str(error))
                continue
            if record is not None and text is not None:
                records.append(record)
                self._stored[record.replica_id] = text
        return tuple(records)

    def _write(self, noted: dict[str, bytes]) -> None:
        for replica_id in self._stored.keys() - noted.keys():
            internal_kv._internal_kv_del(self._prefix + replica_id.encode())
            del self._stored[replica_id]
        for replica_id, text in noted.items():
            if self._stored.get(replica_id) != text:
                internal_kv._internal_kv_put(
                    self._prefix + replica_id.encode(), text, overwrite=True
                )
                self._stored[replica_id] = text
