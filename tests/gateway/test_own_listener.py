"""The port at which one gateway answers for itself, over real sockets."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from deployments.start.ports import free_ports
from serving.gateway.metrics.own_listener import OwnListener

HOST = "127.0.0.1"


def edge(name: str) -> ASGIApp:
    """An edge with a page that needs a key, and a route of the API."""

    async def page(request: Request) -> PlainTextResponse:
        is_known = request.headers.get("authorization") == "Bearer key"
        return PlainTextResponse(name, 200 if is_known else 401)

    async def complete(_: Request) -> PlainTextResponse:
        return PlainTextResponse("tokens")

    return Starlette(routes=[Route("/metrics", page), Route("/v1/completions", complete)])


@asynccontextmanager
async def listening(name: str, ports: Sequence[int]) -> AsyncIterator[OwnListener]:
    listener = OwnListener(edge(name), HOST, ports)
    listener.start()
    try:
        yield listener
    finally:
        await listener.close()


async def get(port: int | None, path: str, key: str = "key") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        headers = {"Authorization": f"Bearer {key}"}
        return await client.get(f"http://{HOST}:{port}{path}", headers=headers)


async def test_two_gateways_of_a_pod_answer_at_two_ports_each_for_itself() -> None:
    ports = free_ports(2)
    async with listening("one", ports) as one, listening("two", ports) as two:
        assert [one.port, two.port] == list(ports)
        assert [(await get(port, "/metrics")).text for port in ports] == ["one", "two"]


async def test_port_of_a_gateway_that_ended_is_its_successors() -> None:
    ports = free_ports(2)
    async with listening("one", ports):
        assert (await get(ports[0], "/metrics")).text == "one"
    async with listening("its successor", ports) as second:
        assert second.port == ports[0]
        assert (await get(ports[0], "/metrics")).text == "its successor"


async def test_nothing_but_the_page_is_served_there_and_keys_are_asked_for() -> None:
    async with listening("one", free_ports(1)) as listener:
        assert (await get(listener.port, "/v1/completions")).status_code == 404
        assert (await get(listener.port, "/metrics", key="wrong")).status_code == 401


async def test_gateway_that_finds_no_port_goes_on_without() -> None:
    ports = free_ports(1)
    async with listening("one", ports), listening("two", ports) as two:
        assert two.port is None
        assert (await get(ports[0], "/metrics")).text == "one"


async def test_gateway_without_the_setting_listens_nowhere() -> None:
    async with listening("one", ()) as listener:
        assert listener.port is None
