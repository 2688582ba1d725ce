"""`GET /fleet/history` over the real edge: what may be asked, and that asking again is cheap."""

import json
from typing import Any

import httpx
import pytest

from serving.config.api_keys import read_keys
from serving.dashboard.history import History, Wanted
from serving.dashboard.history_page import parse_query
from serving.dashboard.pages import DashboardPages
from serving.domain.dashboard_messages import GatewaySample, ModelCounts, PageAnswer, PageRequest
from serving.domain.errors import UnknownModelError
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.gateway.edge.readiness import Readiness
from tests.gateway.test_http_edge import client_of

NOW_S = 1_795_226_400.5
SLOT = int(NOW_S)
MODELS = ("chat", "café \N{GRINNING FACE}")


def filled(seconds: int) -> History:
    history = History("d1", NOW_S)
    for second in range(seconds):
        observe(history, second)
    return history


def observe(history: History, second: int) -> None:
    models = tuple(ModelCounts(model, second, 0) for model in MODELS)
    history.take(GatewaySample("g1", float(second), models=models), NOW_S + second)


def client_over(history: History, *keys: str) -> httpx.AsyncClient:
    pages = DashboardPages(history)

    async def ask_dashboard(request: PageRequest) -> PageAnswer:
        return pages.answer(request)

    edge = HttpEdge(
        {},
        EdgeRules(ApiKeys(read_keys(",".join(keys))), 1000),
        lambda: (b"", "text/plain"),
        lambda: {},
        ask_dashboard,
        lambda: Readiness(is_ready=True, reason="engines take requests"),
    )
    return client_of(edge)


async def ask(history: History, query: str = "", tag: str = "") -> httpx.Response:
    async with client_over(history) as client:
        return await client.get(f"/fleet/history{query}", headers={"if-none-match": tag})


async def test_answer_says_whose_it_is_and_when_its_points_are() -> None:
    answer = await ask(filled(3))
    body: dict[str, Any] = answer.json()
    waiting = body["series"]["sequences"].pop("waiting")
    assert waiting[-3:] == [0, 2, 4]
    assert len(waiting) == 300
    assert set(waiting[:-3]) == {None}
    assert body.pop("series").keys() == {"sequences", "requests_per_s", "losses", "chips"}
    assert body == {
        "dashboard": {"id": "d1", "started_at_s": NOW_S},
        "gateways": ["g1"],
        "model": None,
        "step_s": 1,
        "num_points": 300,
        "from": SLOT + 3 - 300,
        "until": SLOT + 3,
        "num_left_out": 0,
    }
    assert answer.headers["cache-control"] == "no-store"


async def test_before_the_first_sample_there_is_nothing() -> None:
    body = (await ask(History("d1", NOW_S))).json()
    assert (body["from"], body["until"], body["series"]) == (0, 0, {})


async def test_reader_who_has_some_gets_the_rest() -> None:
    body = (await ask(filled(9), f"?since=d1.{SLOT + 7}")).json()
    assert (body["from"], body["until"]) == (SLOT + 7, SLOT + 9)
    assert body["series"]["sequences"]["waiting"] == [14, 16]


async def test_what_a_dashboard_before_told_is_no_reason_to_leave_anything_out() -> None:
    body = (await ask(filled(9), f"?since=d0.{SLOT + 7}")).json()
    assert body["until"] - body["from"] == 300


@pytest.mark.parametrize("query", ["", "?step=10", "?model=chat", f"?since=d1.{SLOT + 2}"])
async def test_nothing_new_is_told_without_a_body(query: str) -> None:
    history = filled(12)
    first = await ask(history, query)
    again = await ask(history, query, f'"other", {first.headers["etag"]}')
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    for second in range(12, 22):
        observe(history, second)
    assert (await ask(history, query, first.headers["etag"])).status_code == 200


async def test_tag_is_of_one_question() -> None:
    history = filled(12)
    queries = ["", "?step=10", "?model=chat", "?model=caf%C3%A9+%F0%9F%98%80", f"?since=d1.{SLOT}"]
    tags = {(await ask(history, query)).headers["etag"] for query in queries}
    assert len(tags) == len(queries)


async def test_model_is_told_alone() -> None:
    body = (await ask(filled(3), "?model=caf%C3%A9+%F0%9F%98%80")).json()
    assert body["model"] == MODELS[1]
    assert body["series"]["sequences"]["waiting"][-3:] == [0, 1, 2]


async def test_history_needs_the_same_key_as_the_fleet() -> None:
    async with client_over(filled(3), "right-key") as client:
        refused = await client.get("/fleet/history")
        assert refused.status_code == 401
        assert "series" not in refused.text
        headers = {"authorization": "Bearer right-key"}
        assert (await client.get("/fleet/history", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?step=5", "step: '5'; allowed: 1 or 10"),
        ("?step=", "step: ''; allowed: 1 or 10"),
        ("?steps=1", "'steps' is no parameter; allowed: step, model, since"),
        ("?since=12", "since: '12'; allowed: the dashboard's id, a dot and the 'until'"),
        ("?since=d1.-1", "since: 'd1.-1'; allowed"),
        ("?since=d1.%C2%B2", "since: 'd1.²'; allowed"),
        ("?since=d1.9999999999999999999", "since: 'd1.9999999999999999999'; allowed"),
    ],
)
async def test_question_that_cannot_be_understood_is_answered_with_what_can(
    query: str, words: str
) -> None:
    answer = await ask(filled(1), query)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_query_is_of_known_models_and_of_this_dashboard() -> None:
    with pytest.raises(UnknownModelError, match="Served here: chat"):
        parse_query("model=none", ("chat",), "d.1")
    query = "step=10&model=chat&since=d.1.7"
    assert parse_query(query, ("chat",), "d.1") == Wanted(10, "chat", 7)
    assert parse_query(query, ("chat",), "d.2") == Wanted(10, "chat", None)


async def test_polls_are_small() -> None:
    history = filled(300)
    whole = await ask(history)
    rest = await ask(history, f"?since=d1.{SLOT + 298}")
    assert len(rest.content) < 430 < 5000 < len(whole.content)
    assert json.loads(rest.content)["series"]["requests_per_s"]["failed"] == [0, 0]
