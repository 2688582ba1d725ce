"""Clients that send slowly, or nothing: how long they hold a gateway's places, and how many."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from serving.gateway.batches.bodies import LEAST_BYTES_PER_S, MAX_TENANT_UPLOADS
from tests.gateway.test_http_edge import client_of

from .kept import Kept
from .lanes import Answering, gateway_in, turn_until, upload
from .test_openai_client import TENANTS, keys_of

DEADLINE_S = 10.0
FORM = {"content-type": "multipart/form-data; boundary=x"}
HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
TAIL = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'


async def trickle(piece: bytes, head: bytes = b"") -> AsyncIterator[bytes]:
    """A body that never ends."""
    yield head
    while True:
        await asyncio.sleep(0.001)
        yield piece


@pytest.mark.parametrize(
    ("path", "head", "piece"),
    [
        ("/v1/files", b"", b""),
        ("/v1/files", HEAD, b""),
        ("/v1/files", HEAD, b"x"),
        ("/v1/batches", b"", b""),
        ("/v1/batches", b"", b" "),
    ],
)
async def test_body_has_a_bounded_time_however_its_client_sends_it(
    kept: Kept, path: str, head: bytes, piece: bytes
) -> None:
    limits: dict[str, Any] = {"gateway": {"body_timeout_s": 0.05}, "deadline_s": DEADLINE_S}
    async with (
        gateway_in(kept, Answering(), runs=False, **limits) as gateway,
        client_of(gateway.edge) as http,
    ):
        answer = await http.post(path, content=trickle(piece, head), headers=FORM)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "body_timeout"
    assert kept.num_contents() == 0


async def test_file_that_comes_fast_enough_may_take_longer_than_other_bodies(kept: Kept) -> None:
    async def steady() -> AsyncIterator[bytes]:
        yield HEAD + b"x" * LEAST_BYTES_PER_S
        for _ in range(4):
            await asyncio.sleep(0.1)
            yield b"x" * LEAST_BYTES_PER_S
        yield TAIL

    async with (
        gateway_in(kept, Answering(), runs=False, gateway={"body_timeout_s": 0.2}) as gateway,
        client_of(gateway.edge) as http,
    ):
        answer = await http.post("/v1/files", content=steady(), headers=FORM)
    assert answer.status_code == 200
    assert answer.json()["bytes"] == 5 * LEAST_BYTES_PER_S


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b"\r\n" * 1000),
        (HEAD + TAIL, b"y" * 1000),
    ],
)
async def test_form_has_little_beside_its_file(kept: Kept, head: bytes, piece: bytes) -> None:
    async with (
        gateway_in(kept, Answering(), runs=False, deadline_s=DEADLINE_S) as gateway,
        client_of(gateway.edge) as http,
    ):
        answer = await http.post("/v1/files", content=trickle(piece, head), headers=FORM)
    assert answer.status_code == 400
    assert "65536 bytes beside its file" in answer.json()["error"]["message"]
    assert kept.num_contents() == 0


async def test_uploads_of_one_tenant_leave_room_for_others(kept: Kept) -> None:
    num_begun, may_end = 0, asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        nonlocal num_begun
        num_begun += 1
        yield HEAD
        await may_end.wait()
        yield b"x" + TAIL

    async with (
        gateway_in(
            kept, Answering(), runs=False, keys=keys_of(*TENANTS), deadline_s=DEADLINE_S
        ) as gateway,
        client_of(gateway.edge) as http,
        gateway.client("k1") as one,
        gateway.client("k2") as other,
        gateway.client("k3") as same,
    ):
        headers = FORM | {"authorization": "Bearer k1"}
        uploads = [
            asyncio.create_task(http.post("/v1/files", content=held(), headers=headers))
            for _ in range(MAX_TENANT_UPLOADS)
        ]
        await turn_until(lambda: num_begun == MAX_TENANT_UPLOADS)
        for client in (one, same):
            with pytest.raises(openai.APIStatusError) as refused:
                await upload(client, b"x")
            assert (refused.value.status_code, refused.value.code) == (503, "too_many_uploads")
            assert "8 files of yours" in refused.value.message
            assert refused.value.response.headers["retry-after"]
        await upload(other, b"x")
        may_end.set()
        answers: list[httpx.Response] = await asyncio.gather(*uploads)
        assert {each.status_code for each in answers} == {200}
        await upload(one, b"x")
