"""Which web pages may ask: none by default, those of the named origins, or all."""

import pytest

from .test_http_edge import EchoFrontend, client_of, edge_over

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


async def test_by_default_no_page_is_let_in_and_no_preflight_answered() -> None:
    async with client_of(edge_over(EchoFrontend("one"), keys=("k1",))) as client:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        headers = {"Origin": PAGE, "Authorization": "Bearer k1"}
        answer = await client.post("/v1/completions", json={"model": "one"}, headers=headers)
    assert preflight.status_code == 401
    assert answer.status_code == 200
    for each in (preflight, answer):
        assert not any(name.startswith("access-control") for name in each.headers)


@pytest.mark.parametrize("origins", [[PAGE, "http://localhost:3000"], ["*"]])
async def test_preflight_is_answered_before_a_key_is_looked_for(origins: list[str]) -> None:
    edge = edge_over(EchoFrontend("one"), keys=("k1",), cors_origins=frozenset(origins))
    async with client_of(edge) as client:
        of_models = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        of_ours = await client.options("/v1/models", headers=PREFLIGHT)
    for answer, methods in ((of_models, "POST"), (of_ours, "GET, HEAD")):
        assert (answer.status_code, answer.text) == (204, "")
        assert answer.headers["access-control-allow-origin"] == ("*" if "*" in origins else PAGE)
        assert answer.headers["access-control-allow-methods"] == methods
        # `*` does not mean this one.
        assert answer.headers["access-control-allow-headers"] == "authorization, *"
        assert "access-control-allow-credentials" not in answer.headers


async def test_allowed_page_may_read_answers_and_refusals() -> None:
    edge = edge_over(EchoFrontend("one"), keys=("k1",), cors_origins=frozenset([PAGE]))
    async with client_of(edge) as client:
        for headers, status in (({"Authorization": "Bearer k1"}, 200), ({}, 401)):
            answer = await client.post(
                "/v1/completions", json={"model": "one"}, headers=headers | {"Origin": PAGE}
            )
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["vary"] == "Origin"
            assert "retry-after" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example.com", "http://chat.example.com", f"{PAGE}.evil.com", "null"]
)
async def test_other_page_may_neither_preflight_nor_read(origin: str) -> None:
    edge = edge_over(EchoFrontend("one"), cors_origins=frozenset([PAGE]))
    async with client_of(edge) as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT | {"Origin": origin})
        answer = await client.post(
            "/v1/completions", json={"model": "one"}, headers={"Origin": origin}
        )
    assert preflight.status_code == 403
    assert "gateway.cors_origins" in preflight.text
    for each in (preflight, answer):
        assert "access-control-allow-origin" not in each.headers
        assert each.headers["vary"] == "Origin"


async def test_request_of_no_page_is_answered_as_ever() -> None:
    edge = edge_over(EchoFrontend("one"), cors_origins=frozenset([PAGE]))
    async with client_of(edge) as client:
        answer = await client.post("/v1/completions", json={"model": "one"})
        wrong = await client.options("/v1/completions")
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert wrong.status_code == 405


async def test_preflight_of_a_route_that_there_is_not_is_404() -> None:
    edge = edge_over(EchoFrontend("one"), cors_origins=frozenset([PAGE]))
    async with client_of(edge) as client:
        assert (await client.options("/scale_elastic_ep", headers=PREFLIGHT)).status_code == 404


async def test_frontend_never_sees_the_origin_and_so_lets_no_page_in() -> None:
    edge = edge_over(EchoFrontend("one"))
    async with client_of(edge) as client:
        answer = await client.post(
            "/v1/completions", json={"model": "one"}, headers={"Origin": PAGE}
        )
    assert "origin" not in answer.json()["headers"]
