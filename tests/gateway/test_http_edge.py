"""The HTTP edge in front of frontends that answer by rote, driven as a server would drive it."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config.api_keys import read_keys
from serving.dashboard.history import History
from serving.dashboard.pages import DashboardPages
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import DashboardUnavailableError, NoEngineInTimeError, RequestError
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.rules import EngineFacts
from serving.gateway.batches.routes import BatchRoutes
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.dispatch.choice.routing import CanaryView
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.fields import BodyJudge
from serving.gateway.edge.http import EdgeRules, HttpEdge, ModelFrontend
from serving.gateway.edge.readiness import Readiness
from serving.gateway.edge.routes import MODEL_ROUTES
from serving.gateway.quotas.book import QuotaBook

DEADLINE_S = 10.0
MAX_BODY_BYTES = 1000
READY = Readiness(is_ready=True, reason="engines take requests")


class EchoFrontend:
    """A frontend that answers with what reached it, in two chunks; `refusal` refuses admission."""

    def __init__(self, name: str, adapters: tuple[str, ...] = ()) -> None:
        self.name = name
        self.adapter_names = adapters
        self.body_judge = BodyJudge(EngineFacts(EngineKind.VLLM))
        self.refusal: RequestError | None = None
        self.canary_of: str | None = None
        self.served_routes = frozenset(map(str, MODEL_ROUTES))
        self.is_broken = False
        self.weight, self.num_ready = 0.0, 0
        self.num_admitted = 0
        self.left = asyncio.Event()  # the client went while an answer was being made

    async def enter(self, target: RequestTarget) -> ASGIApp:
        if target.needs_engine:
            if self.refusal is not None:
                raise self.refusal
            self.num_admitted += 1
        return self._answer

    def canary(self) -> CanaryView:
        return CanaryView(self.name, "v", self.weight, self.num_ready)

    async def cards(self) -> list[dict[str, Any]]:
        return [{"id": name, "object": "model"} for name in (self.name, *self.adapter_names)]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        request_ids = [v.decode() for k, v in scope["headers"] if k == b"x-request-id"]
        seen = {
            "frontend": self.name,
            "path": scope["path"],
            "root_path": scope["root_path"],
            "request_ids": request_ids,
            "body": message["body"].decode(),
            "headers": {k.decode(): v.decode() for k, v in scope["headers"]},
        }
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if b"linger" in message["body"]:
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        text = json.dumps(seen).encode()
        await send({"type": "http.response.body", "body": text[:5], "more_body": True})
        await send({"type": "http.response.body", "body": text[5:]})


def edge_over(
    *frontends: EchoFrontend,
    keys: tuple[str, ...] | ApiKeys = (),
    readiness: Callable[[], Readiness] = lambda: READY,
    gateway_id: str = "",
    quotas: QuotaBook | None = None,
    batches: BatchRoutes | None = None,
    describe_fleet: Callable[[], dict[str, Any]] = lambda: {"models": []},
    **rules: Any,
) -> HttpEdge:
    models: dict[str, ModelFrontend] = {frontend.name: frontend for frontend in frontends}
    known = keys if isinstance(keys, ApiKeys) else ApiKeys(read_keys(",".join(keys)))
    return HttpEdge(
        models,
        EdgeRules(known, **{"max_body_bytes": MAX_BODY_BYTES} | rules),
        render_metrics=lambda _accept: asyncio.sleep(0, (b"up 1\n", "text/plain; version=0.0.4")),
        describe_fleet=describe_fleet,
        ask_dashboard=ask_dashboard,
        readiness=readiness,
        gateway_id=gateway_id,
        quotas=quotas,
        batches=batches,
    )


async def ask_dashboard(request: PageRequest) -> PageAnswer:
    """The dashboard without gateways, in this process."""
    return DashboardPages(History("d", 0.0)).answer(request)


@asynccontextmanager
async def client_of(
    edge: HttpEdge, host: str = "127.0.0.1", root_path: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(edge, client=(host, 4242), root_path=root_path)
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
    ):
        yield client


async def run_raw(edge: HttpEdge, scope: dict[str, Any], *incoming: Message) -> list[Message]:
    """One exchange message by message; the client leaves after `incoming`."""
    pending = list(incoming)
    sent: list[Message] = []

    async def receive() -> Message:
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(DEADLINE_S):
        await edge(scope, receive, send)
    return sent


def post_scope(path: str = "/v1/completions", **headers: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "client": ("127.0.0.1", 1),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    }


# -- which frontend --


@pytest.mark.parametrize(
    ("model", "frontend"), [("one", "one"), ("two", "two"), ("two-lora", "two")]
)
async def test_model_field_selects_the_frontend(model: str, frontend: str) -> None:
    edge = edge_over(EchoFrontend("one"), EchoFrontend("two", ("two-lora",)))
    async with client_of(edge) as client:
        answer = await client.post("/v1/chat/completions", json={"model": model, "x": [1, 2]})
    assert answer.status_code == 200
    seen = answer.json()
    assert (seen["frontend"], seen["path"]) == (frontend, "/v1/chat/completions")
    assert json.loads(seen["body"]) == {"model": model, "x": [1, 2]}


async def test_without_a_model_field_the_only_model_answers() -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.post("/tokenize", json={"prompt": "hi"})
    assert answer.json()["frontend"] == "one"


async def test_without_a_model_field_one_of_several_models_has_to_be_named() -> None:
    async with client_of(edge_over(EchoFrontend("one"), EchoFrontend("two"))) as client:
        answer = await client.post("/tokenize", json={"prompt": "hi"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert "one, two" in error["message"]


async def test_unknown_model_is_404_with_the_models_served() -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.post("/v1/completions", json={"model": "gpt-9"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "one" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"), [(b"{", None), (b'{"model": 7}', "model"), (b"[1]", "model"), (b"", None)]
)
async def test_malformed_body_is_400_with_the_field(body: bytes, param: str | None) -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/", "/docs", "/scale_elastic_ep", "/v1/load_lora_adapter"])
async def test_every_other_route_is_404_whatever_the_frontend_has(path: str) -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.post(path, json={"model": "one"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_frontend_sees_its_own_root_whatever_prefix_serve_put_before() -> None:
    async with client_of(edge_over(EchoFrontend("one")), root_path="/llm") as client:
        answer = await client.post("/llm/v1/completions", json={"model": "one"})
    assert (answer.json()["path"], answer.json()["root_path"]) == ("/v1/completions", "")


# -- the gateway's own routes --


async def test_own_routes_answer() -> None:
    edge = edge_over(EchoFrontend("one"), EchoFrontend("two", ("two-lora",)))
    async with client_of(edge) as client:
        models = (await client.get("/v1/models")).json()
        metrics = await client.get("/metrics")
        fleet = await client.get("/fleet")
        health = await client.get("/health")
    assert [card["id"] for card in models["data"]] == ["one", "two", "two-lora"]
    assert metrics.text == "up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert fleet.json() == {"models": []}
    assert health.status_code == 200


async def test_ready_is_503_with_the_reason_until_the_gateway_is_ready() -> None:
    answers = [Readiness(is_ready=True, reason="engines take requests")]
    answers += [Readiness(is_ready=False, reason="no engine has been ready yet")]
    async with client_of(edge_over(EchoFrontend("one"), readiness=answers.pop)) as client:
        before, after = await client.get("/ready"), await client.get("/ready")
    assert (before.status_code, before.text) == (503, "no engine has been ready yet\n")
    assert (after.status_code, after.text) == (200, "engines take requests\n")


# -- the fleet, for programs and for people --

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/html;q=0.9", False),
        ("text/html, application/json", False),  # no preference
        ("text/html;q=0", False),
        ("text/html;q=oops", False),
        ("image/png", False),
        (CHROMIUM, True),
        ("text/html", True),
        ("TEXT/HTML; charset=utf-8, application/json;q=0.5", True),
        ("text/*, application/json;q=0.1", True),
        ("text/html;q=0.2, application/*;q=0.1", True),
    ],
)
async def test_fleet_is_a_page_for_those_who_prefer_html(accept: str | None, is_page: bool) -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        del client.headers["accept"]
        headers = {} if accept is None else {"Accept": accept}
        answer = await client.get("/fleet", headers=headers)
    wanted = "text/html; charset=utf-8" if is_page else "application/json"
    assert (answer.status_code, answer.headers["content-type"]) == (200, wanted)
    assert answer.headers["vary"] == "Accept"
    if not is_page:
        assert answer.json() == {"models": []}
        assert answer.headers["cache-control"] == "no-store"


async def test_page_and_its_parts_need_no_key_and_hold_no_data_while_the_fleet_needs_one() -> None:
    edge = edge_over(EchoFrontend("one"), keys=("k1",))
    async with client_of(edge) as client:
        page = await client.get("/fleet", headers={"Accept": CHROMIUM})
        parts = [await client.get(f"/fleet/{name}") for name in ("fleet.css", "fleet.js")]
        refused = await client.get("/fleet", headers={"Accept": "application/json"})
        opened = await client.get("/fleet", headers={"Authorization": "Bearer k1"})
    assert [answer.status_code for answer in (page, *parts)] == [200, 200, 200]
    types = [answer.headers["content-type"].partition(";")[0] for answer in (page, *parts)]
    assert types == ["text/html", "text/css", "text/javascript"]
    assert (refused.status_code, opened.status_code) == (401, 200)


async def test_page_lets_nothing_run_but_its_own_script() -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        page = await client.get("/fleet", headers={"Accept": CHROMIUM})
    policy = dict(
        directive.split(maxsplit=1)
        for directive in page.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text


@pytest.mark.parametrize("path", ["/fleet/", "/fleet/index.html", "/fleet/../keys.py"])
async def test_no_other_file_is_served_beside_the_page(path: str) -> None:
    scope = post_scope(path, accept="text/html") | {"method": "GET"}
    sent = await run_raw(edge_over(EchoFrontend("one")), scope)
    assert sent[0]["status"] == 404


async def test_page_without_a_dashboard_is_503_with_the_reason_and_all_else_goes_on() -> None:
    async def nobody(_request: PageRequest) -> PageAnswer:
        raise DashboardUnavailableError("its process is away")

    one = EchoFrontend("one")
    edge = HttpEdge(
        {"one": one},
        EdgeRules(ApiKeys(()), MAX_BODY_BYTES),
        render_metrics=lambda _accept: asyncio.sleep(0, (b"", "text/plain")),
        describe_fleet=lambda: {"models": []},
        ask_dashboard=nobody,
        readiness=lambda: READY,
    )
    async with client_of(edge) as client:
        page = await client.get("/fleet", headers={"Accept": CHROMIUM})
        history = await client.get("/fleet/history")
        fleet = await client.get("/fleet")
        answer = await client.post("/v1/completions", json={"model": "one"})
    for refused in (page, history):
        assert refused.status_code == 503
        assert "its process is away" in refused.json()["error"]["message"]
    assert (fleet.status_code, answer.status_code) == (200, 200)
    # Nobody asked for a model in vain.
    assert [result for _, result, _ in edge.metrics.admissions] == ["admitted"]


# -- admission --


async def test_request_without_an_engine_in_time_is_503_with_the_time_to_retry() -> None:
    frontend = EchoFrontend("one")
    frontend.refusal = NoEngineInTimeError("one", 60.0, 30.0)
    async with client_of(edge_over(frontend)) as client:
        answer = await client.post("/v1/completions", json={"model": "one"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    assert answer.json()["error"]["code"] == "no_engine_in_time"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_routes_that_need_no_engine_are_not_held_up_by_its_absence(path: str) -> None:
    frontend = EchoFrontend("one")
    frontend.refusal = NoEngineInTimeError("one", 60.0, 30.0)
    async with client_of(edge_over(frontend)) as client:
        assert (await client.post(path, json={"model": "one"})).status_code == 200


async def test_errors_of_the_messages_route_have_anthropics_shape() -> None:
    frontend = EchoFrontend("one")
    frontend.refusal = NoEngineInTimeError("one", 60.0, 30.0)
    async with client_of(edge_over(frontend)) as client:
        answer = await client.post("/v1/messages", json={"model": "one"})
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "overloaded_error"


# -- keys --


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/fleet", "/v1/chat/completions", "/no/such/route"]
)
async def test_every_route_but_those_of_probes_needs_a_key(path: str) -> None:
    edge = edge_over(EchoFrontend("one"), keys=("k1",))
    async with client_of(edge) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = await client.post(path, json={"model": "one"}, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for open_path in ("/health", "/ready"):
            assert (await client.get(open_path)).status_code == 200


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer k2"}, {"x-api-key": "k2"}])
async def test_any_of_the_keys_opens_from_anywhere(headers: dict[str, str]) -> None:
    edge = edge_over(EchoFrontend("one"), keys=("k1", "k2"))
    async with client_of(edge, host="10.1.2.3") as client:
        answer = await client.post("/v1/completions", json={"model": "one"}, headers=headers)
    assert answer.status_code == 200


# -- bodies --


async def test_body_at_the_limit_passes_and_one_byte_more_is_413() -> None:
    frontend = EchoFrontend("one")
    async with client_of(edge_over(frontend)) as client:
        filler = MAX_BODY_BYTES - len(json.dumps({"p": ""}))
        fits = json.dumps({"p": "x" * filler}).encode()
        assert len(fits) == MAX_BODY_BYTES
        assert (await client.post("/v1/completions", content=fits)).status_code == 200
        answer = await client.post("/v1/completions", content=fits + b" ")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert frontend.num_admitted == 1


async def test_endless_body_without_a_length_is_refused_at_the_limit() -> None:
    edge = edge_over(EchoFrontend("one"))
    chunk = {"type": "http.request", "body": b"x" * 400, "more_body": True}
    sent = await run_raw(edge, post_scope(), chunk, chunk, chunk)
    assert sent[0]["status"] == 413


async def test_body_in_pieces_reaches_the_frontend_whole() -> None:
    edge = edge_over(EchoFrontend("one"))
    sent = await run_raw(
        edge,
        post_scope(),
        {"type": "http.request", "body": b'{"model":', "more_body": True},
        {"type": "http.request", "body": b' "one"}', "more_body": False},
    )
    answer = b"".join(message.get("body", b"") for message in sent)
    assert json.loads(answer)["body"] == '{"model": "one"}'


async def test_client_that_leaves_before_its_body_is_complete_reaches_no_engine() -> None:
    frontend = EchoFrontend("one")
    piece = {"type": "http.request", "body": b'{"model":', "more_body": True}
    await run_raw(edge_over(frontend), post_scope(), piece)
    assert frontend.num_admitted == 0


async def test_frontend_learns_that_its_client_has_left() -> None:
    frontend = EchoFrontend("one")
    body = {"type": "http.request", "body": b'{"model": "one", "p": "linger"}', "more_body": False}
    await run_raw(edge_over(frontend), post_scope(), body)
    assert frontend.left.is_set()


# -- request ids --


async def test_fit_request_id_is_taken_over_and_left_to_serve_to_answer() -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.post(
            "/v1/completions", json={"model": "one"}, headers={"X-Request-Id": "trace-1:a.b"}
        )
    assert answer.json()["request_ids"] == ["trace-1:a.b"]
    assert "x-request-id" not in answer.headers


@pytest.mark.parametrize("unfit", [None, "", "two words", "x" * 129, "a\tb", "é"])
async def test_missing_or_unfit_request_id_is_made_anew_and_answered(unfit: str | None) -> None:
    headers = {} if unfit is None else {"X-Request-Id": unfit.encode()}
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.post("/v1/completions", json={"model": "one"}, headers=headers)
    (made,) = answer.json()["request_ids"]
    assert made != unfit
    assert answer.headers.get_list("x-request-id") == [made]


async def test_log_names_the_request_and_never_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="serving"):
        async with client_of(edge_over(EchoFrontend("one"), keys=("k1",))) as client:
            await client.post(
                "/v1/completions",
                json={"model": "one", "prompt": "a private question"},
                headers={"X-Request-Id": "trace-1", "Authorization": "Bearer k1"},
            )
    (line,) = [record.getMessage() for record in caplog.records]
    assert "request_id=trace-1" in line
    assert "path=/v1/completions model=one status=200" in line
    assert "private" not in caplog.text
    assert "k1" not in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        {"model": "a private question"},
        {"model": "one", "request_id": "a private question"},
        {"model": "one", "structured_outputs": "a private question"},
        {"model": "one", "vllm_xargs": {"slicewise_a private question": 1}},
    ],
)
async def test_log_of_a_refusal_has_no_word_of_the_request(
    caplog: pytest.LogCaptureFixture, body: dict[str, Any]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="serving"):
        async with client_of(edge_over(EchoFrontend("one"))) as client:
            answer = await client.post("/v1/completions", json=body)
    assert answer.status_code in (400, 404)
    assert "request_refused" in caplog.text
    assert "private" not in caplog.text


# -- other protocols --


async def test_lifespan_is_acknowledged() -> None:
    sent = await run_raw(
        edge_over(),
        {"type": "lifespan"},
        {"type": "lifespan.startup"},
        {"type": "lifespan.shutdown"},
    )
    assert [message["type"] for message in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


async def test_websocket_is_refused() -> None:
    sent = await run_raw(edge_over(), {"type": "websocket", "headers": []})
    assert sent == [{"type": "websocket.close", "code": 1008}]


# -- canaries --


def canary_of(name: str, weight: float, num_ready: int = 1, **given: Any) -> EchoFrontend:
    canary = EchoFrontend(f"{name}-next", **given)
    canary.canary_of, canary.weight, canary.num_ready = name, weight, num_ready
    return canary


async def answered_by(edge: HttpEdge, **body: Any) -> str:
    async with client_of(edge) as client:
        answer = await client.post("/v1/completions", json=body)
    return str(answer.json()["frontend"])


async def test_canary_answers_for_its_share_of_users_and_always_for_the_same() -> None:
    edge = edge_over(EchoFrontend("one"), canary_of("one", 0.5))
    users = [f"user-{number}" for number in range(40)]
    first = [await answered_by(edge, model="one", user=user) for user in users]
    assert set(first) == {"one", "one-next"}
    assert [await answered_by(edge, model="one", user=user) for user in users] == first
    of_metadata = [await answered_by(edge, metadata={"user_id": user}) for user in users]
    assert of_metadata == first


@pytest.mark.parametrize(("weight", "num_ready"), [(0.0, 1), (1.0, 0)])
async def test_canary_without_weight_or_engine_takes_nothing(weight: float, num_ready: int) -> None:
    edge = edge_over(EchoFrontend("one"), canary_of("one", weight, num_ready))
    assert {await answered_by(edge, model="one") for _ in range(5)} == {"one"}
    # By its own name it is asked all the same.
    assert await answered_by(edge, model="one-next") == "one-next"


async def test_request_for_an_adapter_goes_to_a_canary_that_has_it() -> None:
    one = EchoFrontend("one", ("sql", "law"))
    edge = edge_over(one, canary_of("one", 1.0, adapters=("sql",)))
    assert await answered_by(edge, model="sql") == "one-next"
    assert await answered_by(edge, model="law") == "one"


async def test_canary_is_not_listed_and_makes_no_name_needed() -> None:
    edge = edge_over(EchoFrontend("one"), canary_of("one", 0.0))
    assert await answered_by(edge) == "one"
    async with client_of(edge) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        unknown = (await client.post("/v1/completions", json={"model": "two"})).json()
    assert [card["id"] for card in cards] == ["one"]
    assert "one-next" not in unknown["error"]["message"]
