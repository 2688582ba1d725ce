"""The largest file that the configuration allows, through a gateway's HTTP application.

Memory is counted in bytes that Python holds at most beyond what it held before: the file is 200 MB,
and none of it may stay.
"""

import hashlib
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from serving.domain.limits import MIB

from .kept import KeptInFolder
from .lanes import CHAT, Answering, gateway_in, until

pytestmark = [pytest.mark.long]

NUM_LINES = 50_000
LINE_BYTES = 200 * MIB // NUM_LINES
# Pieces of the file and of the form: a fiftieth of the file.
MOST_BYTES = 4 * MIB
# 50,000 names of lines and where each line is, and the lines that are asked.
MOST_INDEX_BYTES = 24 * MIB
BOUNDARY = "line-of-dashes"
DEADLINE_S = 1200.0


def line(number: int) -> bytes:
    """One request, with as long a prompt as makes all of them 200 MB."""
    head = (
        f'{{"custom_id": "line-{number}", "method": "POST", "url": "{CHAT}", "body":'
        ' {"model": "m", "messages": [{"role": "user", "content": "'
    )
    tail = '"}]}}\n'
    return (head + "x" * (LINE_BYTES - len(head) - len(tail)) + tail).encode()


async def form() -> AsyncIterator[bytes]:
    """The upload as a client sends it, a few lines at a time."""
    yield (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    ).encode()
    for first in range(0, NUM_LINES, 20):
        yield b"".join(map(line, range(first, first + 20)))
    yield f"\r\n--{BOUNDARY}--\r\n".encode()


@contextmanager
def held_at_most(most_bytes: int) -> Iterator[None]:
    """Asserts that no more is held at any time in between, beyond what was held before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < most_bytes, f"{(peak - before) / MIB:.1f} MiB were held"


async def test_file_of_200_mb_and_50_000_lines_is_never_held(tmp_path: Any) -> None:
    expected = hashlib.sha256()
    for number in range(NUM_LINES):
        expected.update(line(number))
    model = Answering()
    model.may_answer.clear()
    async with gateway_in(KeptInFolder(tmp_path), model, deadline_s=DEADLINE_S) as gateway:
        transport = httpx.ASGITransport(gateway.edge)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
            with held_at_most(MOST_BYTES):
                response = await http.post("/v1/files", content=form(), headers=kind, timeout=None)
            assert response.status_code == 200, response.text
            file = response.json()
            assert file["bytes"] == NUM_LINES * LINE_BYTES
        (content,) = (tmp_path / "files").iterdir()
        with content.open("rb") as stored:
            assert hashlib.file_digest(stored, "sha256").hexdigest() == expected.hexdigest()

        async with gateway.client() as client:
            with held_at_most(MOST_INDEX_BYTES):
                batch = await client.batches.create(
                    input_file_id=file["id"], endpoint=CHAT, completion_window="24h"
                )
                begun = await until(
                    client,
                    batch.id,
                    lambda batch: batch.status != "validating" and model.num_running > 0,
                )
            assert (begun.status, begun.request_counts.total) == ("in_progress", NUM_LINES)
            await client.batches.cancel(batch.id)
            model.may_answer.set()
            await until(client, batch.id, lambda batch: batch.status == "cancelled")


async def test_file_of_a_byte_more_is_refused(tmp_path: Any) -> None:
    async def longer() -> AsyncIterator[bytes]:
        async for piece in form():
            # Before the last boundary, which is a piece of its own.
            yield (
                b"\n" * (200 * MIB - NUM_LINES * LINE_BYTES + 1) + piece
                if (piece.startswith(b"\r\n--"))
                else piece
            )

    async with gateway_in(KeptInFolder(tmp_path), Answering(), deadline_s=DEADLINE_S) as gateway:
        transport = httpx.ASGITransport(gateway.edge)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
            response = await http.post("/v1/files", content=longer(), headers=kind, timeout=None)
            assert response.status_code == 413
    assert list((tmp_path / "files").iterdir()) == []
