"""Bodies of requests to the batch lane as they come, and how many files come in at once."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from starlette.types import Receive

from serving.domain.errors import BodyTimeoutError
from serving.domain.limits import KIB
from serving.gateway.batches.errors import TooManyUploadsError
from serving.gateway.streams.leaving import ClientLeftError

# A file has a second more for so many bytes of it: half a megabit a second, which slow lines have.
LEAST_BYTES_PER_S = 64 * KIB
MAX_UPLOADS = 16
# What one tenant's keys may have of them.
MAX_TENANT_UPLOADS = 8


async def body_chunks(
    receive: Receive, timeout_s: float, least_bytes_per_s: float = math.inf
) -> AsyncIterator[bytes]:
    """Yields the body as it comes.

    It may take `timeout_s`, and a second more for each `least_bytes_per_s` bytes that have come.
    What counts is the time in which the client is waited for.

    Raises:
        BodyTimeoutError: it did not come in time.
        ClientLeftError: nobody sends the rest.
    """
    clock_s = asyncio.get_running_loop().time
    num_bytes, waited_s, has_more = 0, 0.0, True
    while has_more:
        allowed_s, began_s = timeout_s + num_bytes / least_bytes_per_s, clock_s()
        try:
            if waited_s >= allowed_s:  # messages may be there that bring nothing
                raise TimeoutError
            async with asyncio.timeout(allowed_s - waited_s):
                message = await receive()
        except TimeoutError as error:
            raise BodyTimeoutError(allowed_s) from error
        waited_s += clock_s() - began_s
        if message["type"] != "http.request":
            raise ClientLeftError
        has_more = message.get("more_body", False)
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        yield chunk


class UploadSlots:
    """The files that come in at one gateway. Used from one event loop."""

    def __init__(self) -> None:
        self._num_by_tenant: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Holds the place of one file.

        Raises:
            TooManyUploadsError: the tenant's files, or those of all, have taken theirs.
        """
        num_uploads, num_mine = self._num_by_tenant.total(), self._num_by_tenant[tenant]
        if num_uploads >= MAX_UPLOADS:
            raise TooManyUploadsError(f"{num_uploads} files")
        if num_mine >= MAX_TENANT_UPLOADS:
            raise TooManyUploadsError(f"{num_mine} files of yours")
        self._num_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._num_by_tenant[tenant] -= 1
            self._num_by_tenant += Counter()  # only those that have some
