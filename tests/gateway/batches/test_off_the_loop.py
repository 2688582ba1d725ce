"""Nothing of the lane's store is called on a gateway's event loop, where the streams are."""

import asyncio
import threading
from typing import Any

import openai
import pytest

from serving.domain.limits import KIB
from serving.gateway.batches.bucket import names
from serving.gateway.batches.routes import LaneRequest
from serving.gateway.edge.auth import ANYBODY
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT

from .kept import Kept, KeptInBucket
from .lanes import Answering, begin, chats, ended, gateway_in, turn_until, until, upload
from .test_batch_stores import MANY

DEADLINE_S = 30.0


class _Watched:
    """A store, or a content of it, that notes which of its calls are made in one thread."""

    def __init__(self, watched: Any, thread: int, calls: set[str]) -> None:
        self.watched, self._thread, self._calls = watched, thread, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.watched, name)
        if not callable(method):
            return method

        def call(*values: Any, **named: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._calls.add(name)
            done = method(*map(_bare, values), **named)
            if name in ("open_content", "new_content"):
                return _Watched(done, self._thread, self._calls)
            return done

        return call

    def __enter__(self) -> "_Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bare(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_bare, value))
    return value.watched if isinstance(value, _Watched) else value


class _KeptWatched:
    """A place whose store notes what is called on the event loop."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.on_loop: set[str] = set()

    def open(self) -> Any:
        return _Watched(self.kept.open(), threading.get_ident(), self.on_loop)

    def num_contents(self) -> int:
        return self.kept.num_contents()


def request(method: str, path: str) -> LaneRequest:
    async def nothing() -> Any:
        await asyncio.Event().wait()

    return LaneRequest(method, path, "", "", "", nothing)


async def test_store_is_not_called_on_the_event_loop(kept: Kept) -> None:
    watched, model = _KeptWatched(kept), Answering()
    config = {"max_tenant_bytes": 600 * KIB}
    async with (
        gateway_in(watched, model, config=config, deadline_s=DEADLINE_S) as gateway,
        gateway.client() as client,
    ):
        large = await upload(client, b"x" * 400 * KIB)
        with pytest.raises(openai.APIStatusError, match="delete some"):
            await upload(client, b"x" * 400 * KIB)
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
        await client.files.content(large)
        left: Any = await gateway.lane.routes.answer(
            request("GET", f"/v1/files/{large}/content"), ANYBODY
        )
        assert await anext(left.body_iterator)
        await left.body_iterator.aclose()
        await ended(client, await begin(client, chats(3)))
        model.may_answer.clear()
        batch_id = await begin(client, chats(3))
        await until(client, batch_id, lambda batch: batch.status == "in_progress")
        await turn_until(lambda: model.num_running > 0)
        await client.batches.cancel(batch_id)
        await ended(client, batch_id)
        await client.files.delete(large)
        assert len((await client.batches.list()).data) == 2
    assert watched.on_loop == set()


async def test_client_that_leaves_while_its_file_is_made_leaves_it_whole_or_not_at_all() -> None:
    kept = KeptInBucket()
    is_writing, may_write = threading.Event(), threading.Event()

    def interrupt(call: str, name: str) -> None:
        if call == "write_if" and name.startswith(names.TENANTS):
            is_writing.set()
            may_write.wait()

    kept.bucket.interrupt = interrupt
    async with (
        gateway_in(kept, Answering(), runs=False, deadline_s=DEADLINE_S) as gateway,
        gateway.client() as client,
    ):
        try:
            leaving = asyncio.create_task(upload(client, b"{}"))
            await turn_until(is_writing.is_set)
            leaving.cancel()
            await asyncio.sleep(0)  # it is told
        finally:
            may_write.set()
        await asyncio.gather(leaving, return_exceptions=True)
    store = kept.open()
    for file in store.files(DEFAULT_TENANT, MANY):
        with store.open_content(DEFAULT_TENANT, file.file_id) as content:
            assert content.read() == b"{}"
    assert kept.num_contents() == len(store.files(DEFAULT_TENANT, MANY))
    store.close()
