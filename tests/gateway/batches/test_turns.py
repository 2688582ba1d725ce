"""What a gateway works on that has as many batches as it takes: nobody waits for another tenant."""

import json
import time
from typing import Any

from openai import AsyncOpenAI
from starlette.types import Receive, Scope, Send

from serving.gateway.batches.records import Batch, KeyOfBatch

from .kept import Kept
from .lanes import (
    CHAT,
    Answering,
    begin,
    chats,
    ended,
    gateway_in,
    records,
    turn_until,
    until,
    upload,
)
from .test_openai_client import keys_of

KEYS = keys_of(*({"name": name, "key": f"key-{name}", "tenant": name} for name in "abc"))
ONE: dict[str, Any] = {"batches_at_once": 1, "lease_s": 1.0}
STUCK = chats(3, messages=[{"role": "user", "content": "stuck"}])


class OutOfQuota(Answering):
    """A model that refuses some requests for as long as they come, and answers the others."""

    num_refused = 0

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if json.loads(message["body"])["messages"][0]["content"] != "stuck":

            async def again() -> Any:
                return message

            await super()._answer(scope, again, send)
            return
        self.num_refused += 1
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"60")]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


async def stick(client: AsyncOpenAI, model: OutOfQuota) -> str:
    """Begins a batch that a gateway works on and does not come to the end of."""
    before = model.num_refused
    batch_id = await begin(client, STUCK)
    await turn_until(lambda: model.num_refused > before)
    return batch_id


async def test_tenant_without_quota_holds_up_no_other_one(kept: Kept) -> None:
    model = OutOfQuota()
    async with (
        gateway_in(kept, model, config=ONE, keys=KEYS) as gateway,
        gateway.client("key-a") as client,
        gateway.client("key-b") as other,
    ):
        batch_id = await stick(client, model)
        batch = await ended(other, await begin(other, chats(3)))
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)
        assert (await client.batches.retrieve(batch_id)).status == "in_progress"


async def test_beyond_what_a_gateway_takes_there_are_so_many_and_each_tenant_has_one(
    kept: Kept,
) -> None:
    model = OutOfQuota()
    async with (
        gateway_in(kept, model, config=ONE, keys=KEYS) as gateway,
        gateway.client("key-a") as first,
        gateway.client("key-b") as second,
        gateway.client("key-c") as third,
    ):
        await stick(first, model)
        mine = await begin(first, chats(1))
        second_id = await stick(second, model)
        other = await begin(third, chats(1))
        for client, batch_id in ((first, mine), (third, other)):
            # It is read, and waits.
            batch = await until(client, batch_id, lambda each: each.request_counts.total == 1)
            assert batch.status == "in_progress"
        await turn_until(lambda: gateway.lane.num_leased == 2)
        assert model.num_asked == 0
        await second.batches.cancel(second_id)
        assert (await ended(third, other)).status == "completed"


async def test_batch_that_waits_ends_when_its_client_cancels_it(kept: Kept) -> None:
    model = OutOfQuota()
    async with (
        gateway_in(kept, model, config=ONE) as gateway,
        gateway.client() as client,
    ):
        await stick(client, model)
        batch_id = await begin(client, chats(3))
        await until(client, batch_id, lambda each: each.status == "in_progress")
        await turn_until(lambda: gateway.lane.num_leased == 1)
        await client.batches.cancel(batch_id)
        batch = await ended(client, batch_id)
        assert batch.status == "cancelled"
        left = await records(client, batch.error_file_id)
        assert [each["error"]["code"] for each in left] == ["batch_cancelled"] * 3
        assert (await client.files.delete(batch.input_file_id)).deleted
        assert model.num_asked == 0


async def test_batch_that_waits_ends_when_its_window_is_over(kept: Kept) -> None:
    model = OutOfQuota()
    async with (
        gateway_in(kept, model, config=ONE, keys=KEYS) as gateway,
        gateway.client("key-a") as client,
    ):
        await stick(client, model)
        file_id = await upload(client, chats(3))
        now_s = time.time()
        store = kept.open()
        key = KeyOfBatch("", "a")
        store.add_batch(Batch("late", "a", key, CHAT, file_id, "24h", now_s - 9.0, now_s - 1.0))
        store.close()
        batch = await ended(client, "late")
        assert batch.status == "expired"
        assert [each.code for each in batch.errors.data] == ["batch_expired"]
        assert (await client.files.delete(file_id)).deleted


async def test_fault_of_a_batch_is_told_though_no_gateway_has_room_for_it(kept: Kept) -> None:
    model = OutOfQuota()
    async with (
        gateway_in(kept, model, config=ONE) as gateway,
        gateway.client() as client,
    ):
        await stick(client, model)
        batch = await ended(client, await begin(client, b"no JSON\n"))
        assert batch.status == "failed"
        assert [each.code for each in batch.errors.data] == ["invalid_json_line"]
