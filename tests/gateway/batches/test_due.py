"""What is due by when: the lines without an answer, a little before their batch is over."""

import asyncio
from dataclasses import replace
from pathlib import Path

from serving.domain.capacity.batch_due import BatchDue, DueWork
from serving.gateway.batches.due import due_by_model
from serving.gateway.batches.records import Batch, BatchStatus, KeyOfBatch, TokenUsage
from serving.gateway.edge.http import model_behind
from tests.gateway.test_http_edge import EchoFrontend

from .kept import Kept
from .lanes import Answering, begin, chats, gateway_in, turn_until, until

HOUR_S = 3600.0
BATCH = Batch(
    "b1",
    "a",
    KeyOfBatch(),
    "/v1/completions",
    "file-1",
    "1h",
    1000.0,
    1000.0 + HOUR_S,
    BatchStatus.IN_PROGRESS,
    num_total=100,
    lines_by_model={"chat": 100},
)
DUE_S = 1000.0 + 0.95 * HOUR_S
MODELS = {"chat": "chat", "chat-sql": "chat", "code": "code"}


def test_lines_without_an_answer_are_due_before_their_batch_is_over() -> None:
    usage = TokenUsage(num_input=1000, num_cached=200, num_output=400)
    begun = replace(BATCH, num_completed=8, num_failed=2, usage=usage)
    assert due_by_model([begun], MODELS.get) == {
        "chat": BatchDue((DueWork(DUE_S, 90),), input_tokens_mean=100.0, output_tokens_mean=50.0)
    }


def test_lines_are_of_the_model_behind_their_name() -> None:
    named = {"chat": 20, "chat-sql": 30, "code": 40, "unknown": 10}
    mixed = replace(BATCH, lines_by_model=named, num_completed=50)
    assert due_by_model([mixed], MODELS.get) == {
        "chat": BatchDue((DueWork(DUE_S, 25),)),
        "code": BatchDue((DueWork(DUE_S, 20),)),
    }


def test_batches_that_no_line_of_is_asked_any_more_are_not_due() -> None:
    for status in (BatchStatus.VALIDATING, BatchStatus.CANCELLING, BatchStatus.FINALIZING):
        assert due_by_model([replace(BATCH, status=status)], MODELS.get) == {}


def only_chat(name: str | None) -> str | None:
    return "chat" if name is None else MODELS.get(name)


def test_lines_without_a_name_are_of_the_only_model() -> None:
    usage = TokenUsage(num_input=1000, num_cached=200, num_output=400)
    nameless = replace(BATCH, lines_by_model={}, num_completed=10, usage=usage)
    assert due_by_model([nameless], only_chat) == {
        "chat": BatchDue((DueWork(DUE_S, 90),), input_tokens_mean=80.0, output_tokens_mean=40.0)
    }
    some = replace(BATCH, lines_by_model={"chat-sql": 30, "unknown": 20}, num_completed=50)
    assert due_by_model([some], only_chat)["chat"].work == (DueWork(DUE_S, 40),)


def test_lines_without_a_name_are_of_none_of_several_models() -> None:
    assert due_by_model([replace(BATCH, lines_by_model={})], MODELS.get) == {}
    some = replace(BATCH, lines_by_model={"chat": 50})
    assert due_by_model([some], MODELS.get)["chat"].work == (DueWork(DUE_S, 100),)


def test_model_answers_to_its_name_to_its_adapters_and_alone_to_no_name() -> None:
    chat, code = EchoFrontend("chat", ("chat-sql",)), EchoFrontend("code")
    canary = EchoFrontend("chat-next", ("chat-sql",))
    canary.canary_of = "chat"
    one = {"chat": chat, "chat-next": canary}
    for name, model in (
        *(("chat", "chat"), ("chat-sql", "chat"), ("chat-next", "chat-next")),
        *(("unknown", None), (None, "chat")),
    ):
        assert model_behind(name, one) == model
    assert model_behind(None, one | {"code": code}) is None
    assert model_behind(None, {}) is None


async def test_batch_that_waits_for_a_place_is_due(kept: Kept) -> None:
    """And lines that name no model are of the only one."""
    model = Answering()
    model.may_answer.clear()
    config = {"batches_at_once": 1}
    async with gateway_in(kept, model, config=config) as gateway, gateway.client() as client:
        await begin(client, chats(2))
        await turn_until(lambda: model.num_running > 0)
        waiting = await begin(client, chats(20, model=None))
        await until(client, waiting, lambda batch: batch.status == "in_progress")
        assert model.num_running == 2
        looking = asyncio.create_task(gateway.lane.look_for_due(lambda name: name or "m"))
        await turn_until(lambda: "m" in gateway.lane.due)
        looking.cancel()
        assert gateway.lane.due["m"].num_requests == 22
        model.may_answer.set()


async def test_gateway_that_runs_no_batch_tells_of_those_of_others(kept: Kept) -> None:
    model = Answering()
    model.num_free = 3
    async with (
        gateway_in(kept, model, "gw-1") as gateway,
        gateway_in(kept, model, "gw-2", runs=False) as other,
        gateway.client() as client,
    ):
        await begin(client, chats(20))
        await turn_until(lambda: model.num_running > 0)
        looking = asyncio.create_task(other.lane.look_for_due({"m": "m"}.get))
        await turn_until(lambda: "m" in other.lane.due)
        looking.cancel()
        assert 0 < other.lane.due["m"].num_requests <= 20
        model.may_answer.set()


async def test_work_does_not_go_away_because_nobody_sees_it(kept: Kept) -> None:
    async with gateway_in(kept, Answering(), runs=False) as gateway:
        gateway.lane.due = {"m": BatchDue((DueWork(5.0, 9),))}
        looking = asyncio.create_task(gateway.lane.look_for_due(_fails))
        await asyncio.sleep(0.05)
        assert not looking.done()
        looking.cancel()


def _fails(_name: str) -> str | None:
    raise RuntimeError(f"no such model at {Path.cwd()}")
