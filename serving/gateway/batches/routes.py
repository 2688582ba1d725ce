"""Answers `/v1/files` and `/v1/batches` to the holder of a key.

Owns what is answered to whom: a tenant's files and batches are there for its own keys, and to
others as if there were none. Does not own the routes' names (`edge.routes`), nor the running of
batches (`running`).
"""

import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive

from serving.artifacts.object_store.store import StoreError
from serving.config.api_keys import KeyRecord
from serving.domain.errors import (
    RequestError,
    RequestTooLargeError,
    WrongMethodError,
    error_headers,
    openai_error_body,
)
from serving.domain.limits import KIB
from serving.domain.models.request_fields.service_class import ServiceTier
from serving.gateway.batches.answers import batch_json, file_json, list_json
from serving.gateway.batches.bodies import LEAST_BYTES_PER_S, UploadSlots, body_chunks
from serving.gateway.batches.errors import (
    ObjectStateError,
    StorageFullError,
    StoreUnavailableError,
    TooManyBatchesError,
    UnknownObjectError,
)
from serving.gateway.batches.records import Batch, FilePurpose, StoredFile, cancelled, tenant_of
from serving.gateway.batches.requests import ListBounds, new_batch, page_of, part_of_file
from serving.gateway.batches.running.job import new_file_id
from serving.gateway.batches.running.threads import StoreCalls, to_its_end
from serving.gateway.batches.store import (
    BatchStore,
    FileInUseError,
    MissingFileError,
    NewContent,
    Page,
    StoreFullError,
    TenantBounds,
    TooManyOpenError,
)
from serving.gateway.batches.uploads import UploadForm
from serving.gateway.edge import routes
from serving.gateway.edge.auth import check_route, check_tier

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * KIB
_CHUNK_BYTES = 256 * KIB
_FILES = ListBounds(usual=10_000, most=10_000)
_BATCHES = ListBounds(usual=20, most=100)


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The bounds of the batch lane. `windows_s` are the allowed completion windows by their names.

    A body may take `timeout_s`, one with a file longer by the length of what has come of it.
    """

    max_file_bytes: int
    max_tenant_bytes: int
    max_tenant_batches: int
    file_lifetime_s: float
    windows_s: Mapping[str, float]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """A request for a route of the batch lane; headers that did not come are empty."""

    method: str
    path: str
    query: str
    content_type: str
    range: str
    receive: Receive


class BatchRoutes:
    """Answers the routes of the batch lane."""

    def __init__(
        self,
        store: BatchStore,
        rules: BatchRules,
        now_s: Callable[[], float],
        calls: StoreCalls,
        wake: Callable[[], None],
    ) -> None:
        """Makes the routes over a store; `wake` is called when there is something to do."""
        self._store = store
        self._rules = rules
        self._now_s = now_s
        self._calls = calls
        self._wake = wake
        self._slots = UploadSlots()

    async def answer(self, request: LaneRequest, holder: KeyRecord) -> Response:
        """Returns the answer; refusals are answers too.

        Raises:
            ClientLeftError: nobody reads it any more.
        """
        try:
            return await self._answer(request, holder)
        except RequestError as error:
            return _refused(error)
        except (sqlite3.Error, OSError, StoreError):
            logger.exception("batch_store_failed route=%s", routes.route_of(request.path))
            return _refused(StoreUnavailableError())

    def _answer(self, request: LaneRequest, holder: KeyRecord) -> Awaitable[Response]:
        route, object_id = routes.batch_route_of(request.path)
        methods = routes.BATCH_ROUTES[route]
        if request.method not in methods:
            raise WrongMethodError(request.method, request.path, methods)
        tenant = tenant_of(holder)
        match route, request.method:
            case routes.FILES, "POST":
                return self._upload(request, tenant)
            case routes.FILES, _:
                return self._list_files(request.query, tenant)
            case routes.ONE_FILE, "DELETE":
                return self._delete_file(object_id, tenant)
            case routes.ONE_FILE, _:
                return self._one_file(object_id, tenant)
            case routes.FILE_CONTENT, _:
                return self._content(object_id, tenant, request.range)
            case routes.BATCHES, "POST":
                return self._create(request, holder)
            case routes.BATCHES, _:
                return self._list_batches(request.query, tenant)
            case routes.CANCEL_BATCH, _:
                return self._cancel(object_id, tenant)
            case _:
                return self._one_batch(object_id, tenant)

    # -- files --

    @asynccontextmanager
    async def _new_content(self) -> AsyncIterator[NewContent]:
        """Begins content, and throws it away at the end, unless it has become a file."""
        content: NewContent = await self._calls.brief(self._store.new_content)
        try:
            yield content
        finally:
            await to_its_end(self._calls.bulk(content.discard))

    async def _upload(self, request: LaneRequest, tenant: str) -> Response:
        try:
            with self._slots.hold(tenant):
                return JSONResponse(file_json(await self._take_in(request, tenant)))
        except StoreFullError as error:
            raise StorageFullError(error.num_bytes, error.max_bytes) from error

    async def _take_in(self, request: LaneRequest, tenant: str) -> StoredFile:
        """Makes a file of a form; what has been begun is finished if the client leaves."""
        async with self._new_content() as content:
            form = UploadForm(request.content_type, content, self._rules.max_file_bytes)
            chunks = body_chunks(request.receive, self._rules.timeout_s, LEAST_BYTES_PER_S)
            async for chunk in chunks:
                await to_its_end(self._calls.bulk(form.feed, chunk))
            came = form.finish()
            now_s = self._now_s()
            file = StoredFile(
                new_file_id(),
                tenant,
                came.filename,
                FilePurpose.BATCH,
                content.num_bytes,
                now_s,
                now_s + (came.lifetime_s or self._rules.file_lifetime_s),
            )
            add = self._calls.bulk(
                self._store.add_file, file, content, self._rules.max_tenant_bytes
            )
            await to_its_end(add)
            return file

    async def _list_files(self, query: str, tenant: str) -> Response:
        page, others = page_of(query, _FILES, ("purpose",))
        more = Page(page.limit + 1, page.after, page.is_oldest_first)
        found = await self._calls.brief(self._store.files, tenant, more, others.get("purpose"))
        return _listed([file_json(file) for file in found], page)

    async def _one_file(self, file_id: str, tenant: str) -> Response:
        return JSONResponse(file_json(await self._file(file_id, tenant)))

    async def _file(self, file_id: str, tenant: str) -> StoredFile:
        file: StoredFile | None = await self._calls.brief(self._store.file, tenant, file_id)
        if file is None:
            raise UnknownObjectError("file", file_id)
        return file

    async def _delete_file(self, file_id: str, tenant: str) -> Response:
        try:
            now_s = self._now_s()
            if not await self._calls.brief(self._store.delete_file, tenant, file_id, now_s):
                raise UnknownObjectError("file", file_id)
        except FileInUseError as error:
            message = (
                f"{file_id} is read by {error.batch_id}, which has not ended; cancel it first."
            )
            raise ObjectStateError(message) from error
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, file_id: str, tenant: str, wanted: str) -> Response:
        file = await self._file(file_id, tenant)
        part = part_of_file(wanted, file.num_bytes)
        begin, end = part or (0, file.num_bytes)
        if end < begin:
            headers = {"content-range": f"bytes */{file.num_bytes}"}
            return Response(None, 416, headers)
        try:
            content = await self._calls.bulk(self._store.open_content, tenant, file_id)
        except MissingFileError as error:
            raise UnknownObjectError("file", file_id) from error
        headers = {"accept-ranges": "bytes", "content-length": str(end - begin)}
        if part is not None:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{file.num_bytes}"
        return StreamingResponse(
            self._read(content, begin, end),
            200 if part is None else 206,
            headers,
            "application/octet-stream",
        )

    async def _read(self, content: BinaryIO, begin: int, end: int) -> AsyncIterator[bytes]:
        try:
            await self._calls.bulk(content.seek, begin)
            while begin < end:
                chunk: bytes = await self._calls.bulk(content.read, min(_CHUNK_BYTES, end - begin))
                if not chunk:
                    raise OSError("the content is shorter than its record says")
                begin += len(chunk)
                yield chunk
        finally:
            # A thread may be reading, which a caller that is cancelled does not wait for.
            await to_its_end(self._calls.bulk(content.close))

    # -- batches --

    async def _create(self, request: LaneRequest, holder: KeyRecord) -> Response:
        body = b""
        async for chunk in body_chunks(request.receive, self._rules.timeout_s):
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                raise RequestTooLargeError(_MAX_BODY_BYTES)
        batch = new_batch(body, holder, self._rules.windows_s, self._now_s())
        # Its lines would be refused one by one.
        check_route(holder, batch.endpoint)
        check_tier(holder, ServiceTier.FLEX)
        try:
            bounds = TenantBounds(self._rules.max_tenant_batches, self._rules.max_tenant_bytes)
            await self._calls.brief(self._store.add_batch, batch, bounds)
        except TooManyOpenError as error:
            raise TooManyBatchesError(error.num_open, error.most) from error
        except StoreFullError as error:
            raise StorageFullError(error.num_bytes, error.max_bytes) from error
        except MissingFileError as error:
            raise UnknownObjectError("file", batch.input_file_id, "input_file_id") from error
        self._wake()
        logger.info("batch_made batch=%s tenant=%s", batch.batch_id, batch.tenant)
        return JSONResponse(batch_json(batch))

    async def _list_batches(self, query: str, tenant: str) -> Response:
        page, _ = page_of(query, _BATCHES)
        more = Page(page.limit + 1, page.after, page.is_oldest_first)
        found = await self._calls.brief(self._store.batches, tenant, more)
        return _listed([batch_json(batch) for batch in found], page)

    async def _one_batch(self, batch_id: str, tenant: str) -> Response:
        batch = await self._calls.brief(self._store.batch, tenant, batch_id)
        if batch is None:
            raise UnknownObjectError("batch", batch_id)
        return JSONResponse(batch_json(batch))

    async def _cancel(self, batch_id: str, tenant: str) -> Response:
        now_s = self._now_s()
        try:
            batch = await self._calls.brief(self._cancelled, batch_id, tenant, now_s)
        except ValueError as error:
            raise ObjectStateError(f"{batch_id} cannot be cancelled: {error}.") from error
        if batch is None:
            raise UnknownObjectError("batch", batch_id)
        self._wake()
        return JSONResponse(batch_json(batch))

    def _cancelled(self, batch_id: str, tenant: str, now_s: float) -> Batch | None:
        """Cancels a batch; one that somebody leases meanwhile is left to its owner to end."""
        free = self._store.change_free(
            tenant, batch_id, now_s, lambda each: cancelled(each, now_s, is_free=True)
        )
        if free is not None:
            return free
        return self._store.change(tenant, batch_id, lambda each: cancelled(each, now_s))


def _listed(found: list[dict[str, Any]], page: Page) -> Response:
    has_more = len(found) > page.limit
    return JSONResponse(list_json(found[: page.limit], has_more=has_more))


def _refused(error: RequestError) -> Response:
    headers = error_headers(error)
    return JSONResponse(openai_error_body(error), status_code=error.status, headers=headers)
