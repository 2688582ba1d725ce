"""No long call of a bucket keeps a lease from being renewed, or clients from their answers."""

import asyncio
import threading
from collections import Counter
from typing import Any

from serving.artifacts.object_store.store import VersionedObject
from serving.gateway.batches.bucket import names
from serving.gateway.batches.bucket.bucket import BatchBucket
from tests.artifacts.object_store.memory_store import MemoryStore

from .kept import KeptInBucket
from .lanes import Answering, begin, chats, ended, gateway_in, records, turn_until, until, upload

LEASE_S = 1.0
DEADLINE_S = 30.0
CONFIG: dict[str, Any] = {"lease_s": LEASE_S, "batches_at_once": 4}


class _GatedBucket(MemoryStore):
    """A bucket that keeps answers, or uploads, from whoever asks until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.num_waiting = 0
        self.reads: Counter[str] = Counter()
        self.interrupt = self._hold_uploads

    def read(self, name: str) -> VersionedObject:
        self.reads[name] += 1
        if "/answers/" in name:
            self._wait()
        return super().read(name)

    def _hold_uploads(self, call: str, _name: str) -> None:
        if call == "upload":
            self._wait()

    def _wait(self) -> None:
        self.num_waiting += not self.gate.is_set()
        self.gate.wait()


class _KeptBehindGate(KeptInBucket):
    def __init__(self) -> None:
        super().__init__()
        self.bucket: _GatedBucket = _GatedBucket()

    def until_s(self) -> dict[str, float]:
        """When the leases of the open batches end."""
        bucket = BatchBucket(self.bucket)
        ids = {names.batch_of(each.name) for each in self.bucket.list(names.BATCHES)}
        heads = [bucket.head(batch_id) for batch_id in ids if batch_id is not None]
        return {head.batch.batch_id: head.until_s for head in heads if head is not None}

    async def see_renewed(self) -> None:
        """Waits until each lease has been lengthened."""
        before = self.until_s()
        assert before
        await turn_until(
            lambda: all(until_s > before[each] for each, until_s in self.until_s().items())
        )


async def test_leases_are_renewed_while_all_batches_write_their_files() -> None:
    kept, model = _KeptBehindGate(), Answering()
    model.may_answer.clear()
    async with (
        gateway_in(kept, model, config=CONFIG, deadline_s=DEADLINE_S) as gateway,
        gateway.client() as client,
    ):
        try:
            batch_ids = [await begin(client, chats(3)) for _ in range(4)]
            kept.bucket.gate.clear()
            model.may_answer.set()
            await turn_until(lambda: kept.bucket.num_waiting >= 4)
            await kept.see_renewed()
        finally:
            kept.bucket.gate.set()
        for batch_id in batch_ids:
            batch = await ended(client, batch_id)
            assert batch.status == "completed"
            assert len(await records(client, batch.output_file_id)) == 3


async def test_leases_are_renewed_and_clients_answered_while_files_are_uploaded() -> None:
    kept, model = _KeptBehindGate(), Answering()
    model.may_answer.clear()
    async with (
        gateway_in(kept, model, config=CONFIG, deadline_s=DEADLINE_S) as gateway,
        gateway.client() as client,
    ):
        batch_id = await begin(client, chats(3))
        await until(client, batch_id, lambda batch: batch.status == "in_progress")
        kept.bucket.gate.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(upload(client, b"{}"))
                try:
                    await turn_until(lambda: kept.bucket.num_waiting >= 4)
                    await kept.see_renewed()
                    assert (await client.batches.retrieve(batch_id)).status == "in_progress"
                finally:
                    kept.bucket.gate.set()
        finally:
            model.may_answer.set()
        assert (await ended(client, batch_id)).status == "completed"


async def test_answers_are_read_once_for_both_files() -> None:
    kept, model = _KeptBehindGate(), Answering()
    model.statuses = [400, 200, 400]
    async with (
        gateway_in(kept, model, config=CONFIG, deadline_s=DEADLINE_S) as gateway,
        gateway.client() as client,
    ):
        batch = await ended(client, await begin(client, chats(5)))
        assert len(await records(client, batch.output_file_id)) == 3
        assert len(await records(client, batch.error_file_id)) == 2
    answers = names.answers_folder(batch.id)
    counts = [count for name, count in kept.bucket.reads.items() if name.startswith(answers)]
    assert counts
    assert set(counts) == {1}
