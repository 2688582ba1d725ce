"""OpenAI's own client against a gateway's edge: files, batches, tenants, refusals."""

import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from serving.config.api_keys import read_keys
from serving.domain.errors import NoRoomInTimeError
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.batches.running.runner import OthersWork
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import HttpEdge
from serving.gateway.edge.routes import BATCH_ROUTES
from serving.gateway.metrics.batches import BatchCollector
from tests.gateway.test_http_edge import EchoFrontend, client_of, edge_over

from .kept import Kept
from .lanes import (
    CHAT,
    FINAL,
    Answering,
    begin,
    chats,
    ended,
    gateway_in,
    records,
    turn_until,
    upload,
)


async def client_get(edge: HttpEdge, path: str) -> Any:
    async with client_of(edge) as http:
        return (await http.get(path)).json()


def keys_of(*records: dict[str, Any]) -> ApiKeys:
    return ApiKeys(read_keys(json.dumps({"keys": list(records)})))


TENANTS = (
    {"name": "one", "key": "k1", "tenant": "a"},
    {"name": "two", "key": "k2", "tenant": "b"},
    {"name": "three", "key": "k3", "tenant": "a"},
)


async def test_batch_goes_from_upload_to_answers(kept: Kept) -> None:
    model = Answering()
    async with gateway_in(kept, model) as gateway, gateway.client() as client:
        metadata = {"run": "7"}
        batch_id = await begin(client, chats(30), metadata=metadata)
        batch = await ended(client, batch_id)
        assert batch.status == "completed"
        assert batch.metadata == metadata
        assert (batch.endpoint, batch.completion_window) == (CHAT, "24h")
        assert batch.expires_at - batch.created_at == 24 * 3600
        assert batch.created_at <= batch.in_progress_at <= batch.completed_at
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
        assert (batch.usage.input_tokens, batch.usage.total_tokens) == (120, 150)
        answers = await records(client, batch.output_file_id)
        assert batch.error_file_id is None
        said = {
            each["custom_id"]: each["response"]["body"]["echo"][0]["content"] for each in answers
        }
        assert said == {f"line-{number}": str(number) for number in range(30)}
        assert [page.id async for page in await client.batches.list()] == [batch_id]
        file = await client.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.status, file.object) == ("batch_output", "processed", "file")
    assert model.num_asked == 30


async def test_lines_are_asked_as_the_lowest_class_whatever_they_say(kept: Kept) -> None:
    targets: list[RequestTarget] = []

    class Noting(Answering):
        async def enter(self, target: RequestTarget) -> Any:
            targets.append(target)
            return await super().enter(target)

    async with gateway_in(kept, Noting()) as gateway, gateway.client() as client:
        await ended(client, await begin(client, chats(2, service_tier="priority")))
    assert [target.service_class for target in targets] == [ServiceClass.BATCH] * 2


async def test_lines_in_flight_are_bounded(kept: Kept) -> None:
    model = Answering()
    config = {"lines_in_flight": 3}
    async with (
        gateway_in(kept, model, config=config) as gateway,
        gateway.client() as client,
    ):
        model.may_answer.clear()
        batch_id = await begin(client, chats(40))
        await turn_until(lambda: model.num_running == 3)
        model.may_answer.set()
        assert (await ended(client, batch_id)).status == "completed"
    assert (model.most_running, model.num_asked) == (3, 40)


async def test_line_is_judged_as_a_request_of_its_key(kept: Kept) -> None:
    record = {"name": "one", "key": "k1", "models": ["m", "gone"], "tenant": "a"}
    lines = b"".join(
        (
            chats(1, n=100_000),
            chats(1, model="other").replace(b"line-0", b"line-1"),
            chats(1, model="gone").replace(b"line-0", b"line-2"),
            chats(1, priority=3).replace(b"line-0", b"line-3"),
            chats(1).replace(b"line-0", b"line-4"),
        )
    )
    model = Answering()
    async with (
        gateway_in(kept, model, keys=keys_of(record)) as gateway,
        gateway.client("k1") as client,
    ):
        batch = await ended(client, await begin(client, lines))
        failed = {
            each["custom_id"]: (
                each["response"]["status_code"],
                each["response"]["body"]["error"]["code"]
                or each["response"]["body"]["error"]["param"],
            )
            for each in await records(client, batch.error_file_id)
        }
        answered = await records(client, batch.output_file_id)
    assert failed == {
        "line-0": (400, "n"),
        "line-1": (403, "model_not_allowed"),
        "line-2": (404, "model_not_found"),
        "line-3": (400, "unsupported_parameter"),
    }
    assert [each["custom_id"] for each in answered] == ["line-4"]
    assert batch.status == "completed"
    assert model.num_asked == 1


async def test_refused_line_waits_and_is_asked_again(kept: Kept) -> None:
    model = Answering()
    model.statuses = [429]
    async with gateway_in(kept, model) as gateway, gateway.client() as client:
        batch = await ended(client, await begin(client, chats(2)))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 0)
        assert model.num_asked == 3
        assert gateway.lane.counts.num_refused == 1
        model.refusal = NoRoomInTimeError("m", 600.0, 1.0)
        batch_id = await begin(client, chats(1))
        await turn_until(lambda: gateway.lane.counts.num_refused == 2)
        model.refusal = None
        assert (await ended(client, batch_id)).status == "completed"


@pytest.mark.parametrize(("status", "num_asked"), [(500, 3), (FINAL, 1)])
async def test_fault_is_asked_again_unless_it_says_that_it_stays(
    kept: Kept, status: int, num_asked: int
) -> None:
    model = Answering()
    model.statuses = [status] * 3
    async with gateway_in(kept, model) as gateway, gateway.client() as client:
        batch = await ended(client, await begin(client, chats(1)))
        (failed,) = await records(client, batch.error_file_id)
    assert failed["response"]["status_code"] == status
    assert model.num_asked == num_asked


async def test_bad_lines_are_told_by_number_and_nothing_is_asked(kept: Kept) -> None:
    model = Answering()
    content = chats(2) + b"no JSON\n" + chats(1)
    async with gateway_in(kept, model) as gateway, gateway.client() as client:
        batch = await ended(client, await begin(client, content))
    assert batch.status == "failed"
    told = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert told == [(3, "invalid_json_line", None), (4, "duplicate_custom_id", "custom_id")]
    assert model.num_asked == 0


async def test_cancelled_batch_stops_and_keeps_what_it_has(kept: Kept) -> None:
    model = Answering()
    model.num_free = 3  # the other ones wait
    config = {"lines_in_flight": 2, "lease_s": 1.0}
    async with (
        gateway_in(kept, model, config=config) as gateway,
        gateway.client() as client,
    ):
        batch_id = await begin(client, chats(10))
        await turn_until(lambda: model.num_running == 2)
        cancelling = await client.batches.cancel(batch_id)
        assert cancelling.status == "cancelling"
        batch = await ended(client, batch_id)
        assert batch.status == "cancelled"
        assert model.num_running == 0
        done = await records(client, batch.output_file_id)
        left = await records(client, batch.error_file_id)
        assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
        assert len(done) == 3
        ids = [each["custom_id"] for each in done + left]
        assert sorted(ids) == sorted(f"line-{number}" for number in range(10))
        assert batch.cancelling_at <= batch.cancelled_at
        with pytest.raises(openai.ConflictError, match="it is cancelled"):
            await client.batches.cancel(batch_id)


async def test_batch_that_nobody_works_on_is_cancelled_at_once(kept: Kept) -> None:
    async with gateway_in(kept, Answering(), runs=False) as gateway, gateway.client() as client:
        batch_id = await begin(client, chats(3))
        batch = await client.batches.cancel(batch_id)
        assert batch.status == "cancelled"
        assert batch == await client.batches.retrieve(batch_id)
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert batch.cancelling_at == batch.cancelled_at
        assert (await client.files.delete(batch.input_file_id)).deleted


async def test_files_and_batches_are_of_the_tenant(kept: Kept) -> None:
    keys = keys_of(*TENANTS)
    async with (
        gateway_in(kept, Answering(), keys=keys) as gateway,
        gateway.client("k1") as mine,
        gateway.client("k2") as others,
        gateway.client("k3") as colleague,
    ):
        file_id = await upload(mine, chats(1))
        batch = await mine.batches.create(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h"
        )
        assert (await colleague.files.retrieve(file_id)).id == file_id
        assert (await colleague.batches.retrieve(batch.id)).id == batch.id
        for ask in (
            lambda: others.files.retrieve(file_id),
            lambda: others.files.content(file_id),
            lambda: others.files.delete(file_id),
            lambda: others.batches.retrieve(batch.id),
            lambda: others.batches.cancel(batch.id),
            lambda: others.batches.create(
                input_file_id=file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask()
        assert (await others.files.list()).data == []
        assert (await others.batches.list()).data == []
        with pytest.raises(openai.AuthenticationError):
            async with gateway.client("no such key") as nobody:
                await nobody.files.list()


async def test_key_has_to_be_for_what_its_batch_asks(kept: Kept) -> None:
    records = (
        {"name": "a", "key": "k1", "tenant": "a", "routes": ["/v1/completions"]},
        {"name": "b", "key": "k2", "tenant": "a", "service_tiers": ["default"]},
        {"name": "c", "key": "k3", "tenant": "a", "scopes": ["metrics"]},
    )
    async with gateway_in(kept, Answering(), keys=keys_of(*records)) as gateway:
        for key, code in (("k1", "route_not_allowed"), ("k2", "service_tier_not_allowed")):
            async with gateway.client(key) as client:
                with pytest.raises(openai.PermissionDeniedError) as refused:
                    await begin(client, chats(1))
            assert refused.value.code == code
        async with gateway.client("k3") as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.files.list()


async def test_key_that_is_gone_is_stood_for_by_its_successor(kept: Kept) -> None:
    keys = keys_of(*TENANTS)
    async with gateway_in(kept, Answering(), runs=False, keys=keys) as first:
        async with first.client("k1") as client:
            replaced = await begin(client, chats(1))
        async with first.client("k2") as client:
            gone = await begin(client, chats(1))
    rotated = keys_of(TENANTS[0] | {"key": "new"}, TENANTS[1] | {"name": "x", "key": "other"})
    async with (
        gateway_in(kept, Answering(), keys=rotated) as gateway,
        gateway.client("new") as client,
    ):
        assert (await ended(client, replaced)).request_counts.completed == 1
        async with gateway.client("other") as client:
            batch = await ended(client, gone)
            (failed,) = await records(client, batch.error_file_id)
    assert failed["response"]["status_code"] == 401


async def test_file_is_read_in_parts_and_deleted(kept: Kept) -> None:
    content = chats(50)
    async with gateway_in(kept, Answering()) as gateway, gateway.client() as client:
        file_id = await upload(client, content)
        assert (await client.files.content(file_id)).content == content
        async with client_of(gateway.edge) as http:
            for asked, status, got in (
                ("bytes=0-9", 206, content[:10]),
                ("bytes=10-", 206, content[10:]),
                ("bytes=-7", 206, content[-7:]),
                ("bytes=5-999999", 206, content[5:]),
                ("bytes=999999-", 416, b""),
                ("lines=1-2", 200, content),
            ):
                path = f"/v1/files/{file_id}/content"
                answer = await http.get(path, headers={"range": asked})
                assert (answer.status_code, answer.content) == (status, got), asked
                if status == 206:
                    assert answer.headers["content-range"].endswith(f"/{len(content)}")
        deleted = await client.files.delete(file_id)
        assert deleted.deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file_id)


async def test_file_of_a_batch_that_runs_is_not_deleted(kept: Kept) -> None:
    async with gateway_in(kept, Answering(), runs=False) as gateway, gateway.client() as client:
        batch = await client.batches.retrieve(await begin(client, chats(1)))
        with pytest.raises(openai.ConflictError, match=batch.id):
            await client.files.delete(batch.input_file_id)


async def test_lists_have_pages(kept: Kept) -> None:
    async with gateway_in(kept, Answering(), runs=False) as gateway, gateway.client() as client:
        ids = [await begin(client, chats(1)) for _ in range(5)]
        first = await client.batches.list(limit=2)
        assert [each.id for each in first.data] == ids[:2:-1]
        assert first.has_more
        assert [each.id async for each in await client.batches.list(limit=2)] == ids[::-1]
        files = [each.id async for each in await client.files.list(limit=2, order="asc")]
        assert len(files) == len(set(files)) == 5
        assert (await client.files.list(purpose="batch_output")).data == []


@pytest.mark.parametrize(
    "query",
    [
        *({"limit": limit} for limit in ("0", "101", "-1", "x", "", "²", "٣")),
        {"limit": "0000000011000000"},
        {"limit": "000000001" + "9" * 5000},
        {"order": "up"},
        {"page": "2"},
    ],
    ids=lambda query: str(query)[:20],
)
async def test_page_that_is_none_is_refused(kept: Kept, query: dict[str, str]) -> None:
    async with (
        gateway_in(kept, Answering(), runs=False) as gateway,
        client_of(gateway.edge) as http,
    ):
        answer = await http.get("/v1/batches", params=query)
    assert answer.status_code == 400
    assert "allowed: " in answer.json()["error"]["message"]


async def test_file_has_bounds(kept: Kept) -> None:
    config = {"max_file_bytes": 2000, "max_tenant_bytes": 3000}
    async with (
        gateway_in(kept, Answering(), runs=False, config=config) as gateway,
        gateway.client() as client,
    ):
        await upload(client, b"x" * 2000)
        for size, code in ((2001, "file_too_large"), (1001, "storage_full")):
            with pytest.raises(openai.APIStatusError) as refused:
                await upload(client, b"x" * size)
            assert refused.value.status_code == 413
            assert refused.value.code == code
        assert len((await client.files.list()).data) == 1
        assert kept.num_contents() == 1


async def test_tenant_may_have_so_many_batches_at_once(kept: Kept) -> None:
    config = {"max_tenant_batches": 2}
    async with (
        gateway_in(kept, Answering(), runs=False, config=config) as gateway,
        gateway.client() as client,
    ):
        ids = [await begin(client, chats(1)) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match=r"2 of your .* of 2 that") as refused:
            await begin(client, chats(1))
        assert refused.value.code == "too_many_batches"
        assert {each.id for each in (await client.batches.list()).data} == set(ids)
        gateway.start()
        for batch_id in ids:
            await ended(client, batch_id)
        made = None
        while made is None:  # a bucket's catalog hears of an end a little later
            with contextlib.suppress(openai.RateLimitError):
                made = await begin(client, chats(1))
        assert (await ended(client, made)).status == "completed"


async def test_tenant_whose_answers_fill_its_room_makes_no_batch(kept: Kept) -> None:
    config = {"max_file_bytes": 2000, "max_tenant_bytes": 2000}
    async with (
        gateway_in(kept, Answering(), config=config) as gateway,
        gateway.client() as client,
    ):
        file_id = await upload(client, chats(10))
        asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await ended(client, (await client.batches.create(**asked)).id)
        assert batch.status == "completed"
        with pytest.raises(openai.APIStatusError, match="delete some") as refused:
            await client.batches.create(**asked)
        assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
        await client.files.delete(batch.output_file_id)
        await client.batches.create(**asked)


async def test_file_expires_when_its_client_says(kept: Kept) -> None:
    async with gateway_in(kept, Answering(), runs=False) as gateway, gateway.client() as client:
        file = await client.files.create(
            file=("in.jsonl", b"{}"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert file.expires_at is not None
        assert file.expires_at - file.created_at == 7200
        usual = await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert usual.expires_at is not None
        assert usual.expires_at - usual.created_at == 30 * 86_400
        with pytest.raises(openai.BadRequestError, match="3600 to 2592000"):
            await client.files.create(
                file=("in.jsonl", b"{}"),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 60},
            )


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ({"data": {"purpose": "batch"}}, "multipart/form-data"),
        ({"files": {"file": ("a", b"x")}}, "purpose: missing; allowed: batch"),
        (
            {"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}},
            "'fine-tune'; allowed: batch",
        ),
        ({"files": {"purpose": (None, b"batch")}}, "file: missing"),
        ({"files": {"file": ("a", b"x"), "other": (None, b"x")}}, "'other': no such field"),
        ({"files": [("file", ("a", b"x")), ("file", ("b", b"x"))]}, "file: given twice"),
        ({"files": {"file": ("a", b"x"), "purpose": (None, b"x" * 201)}}, "at most 200 bytes"),
        (
            {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            "ends before its last boundary",
        ),
    ],
)
async def test_form_that_is_no_upload_is_refused(
    kept: Kept, form: dict[str, Any], shown: str
) -> None:
    async with (
        gateway_in(kept, Answering(), runs=False) as gateway,
        client_of(gateway.edge) as http,
    ):
        answer = await http.post("/v1/files", **form)
    assert answer.status_code == 400
    assert shown in answer.json()["error"]["message"]
    assert kept.num_contents() == 0


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"endpoint": "/v1/moderations"}, "'/v1/moderations'; allowed: /v1/chat/completions"),
        ({"completion_window": "1h"}, "'1h'; allowed: 24h"),
        ({"completion_window": None}, "completion_window"),
        ({"metadata": {"x": "y" * 513}}, "metadata: allowed: at most 16 pairs"),
        ({"metadata": {str(each): "" for each in range(17)}}, "at most 16 pairs"),
        ({"speed": "high"}, "speed"),
        ({"output_expires_after": {"anchor": "end", "seconds": 7200}}, "allowed: created_at"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "3600 to 2592000"),
    ],
)
async def test_batch_that_cannot_be_is_refused(
    kept: Kept, changes: dict[str, Any], shown: str
) -> None:
    async with (
        gateway_in(kept, Answering(), runs=False) as gateway,
        gateway.client() as client,
        client_of(gateway.edge) as http,
    ):
        asked = {
            "input_file_id": await upload(client, chats(1)),
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        answer = await http.post("/v1/batches", json=asked | changes)
        assert (await client.batches.list()).data == []
    assert answer.status_code == 400
    assert shown in answer.json()["error"]["message"]


async def test_output_expires_as_the_batch_says(kept: Kept) -> None:
    async with gateway_in(kept, Answering()) as gateway, gateway.client() as client:
        expiry = {"anchor": "created_at", "seconds": 3600}
        batch = await ended(client, await begin(client, chats(1), output_expires_after=expiry))
        file = await client.files.retrieve(batch.output_file_id)
        assert file.expires_at is not None
        assert file.expires_at - file.created_at == 3600


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, POST"),
        ("POST", "/v1/files/file-1", "GET, DELETE"),
        ("DELETE", "/v1/files/file-1/content", "GET"),
        ("DELETE", "/v1/batches/b", "GET"),
        ("GET", "/v1/batches/b/cancel", "POST"),
    ],
)
async def test_route_has_its_methods(kept: Kept, method: str, path: str, allowed: str) -> None:
    async with (
        gateway_in(kept, Answering(), runs=False) as gateway,
        client_of(gateway.edge) as http,
    ):
        answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


async def test_without_a_folder_the_routes_say_so() -> None:
    async with client_of(edge_over(EchoFrontend("m"))) as http:
        for answer in (await http.get("/v1/files"), await http.post("/v1/batches", json={})):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "batches_off"
            assert "batches.folder" in answer.json()["error"]["message"]


async def test_description_has_the_routes_and_their_methods(kept: Kept) -> None:
    async with (
        gateway_in(kept, Answering(), runs=False) as gateway,
        client_of(gateway.edge) as http,
    ):
        described = (await http.get("/openapi.json")).json()["paths"]
        without = (await client_get(edge_over(EchoFrontend("m")), "/openapi.json"))["paths"]
    methods = {
        route: tuple(method.upper() for method in described.get(route, ()))
        for route in BATCH_ROUTES
    }
    assert methods == BATCH_ROUTES
    assert not without.keys() & BATCH_ROUTES.keys()


async def test_metrics_tell_what_became_of_lines(kept: Kept) -> None:
    model = Answering()
    model.statuses = [400, 429]
    async with gateway_in(kept, model) as gateway, gateway.client() as client:
        await ended(client, await begin(client, chats(3)))
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in BatchCollector(gateway.lane).collect()
            for sample in family.samples
        }
    name = "slicewise_batch_lines_total"
    assert samples[name, "completed"] == 2
    assert samples[name, "failed"] == 1
    assert samples[name, "refused"] == 1
    assert samples["slicewise_batches_leased",] in (0, 1)


async def test_client_that_leaves_while_it_uploads_leaves_nothing(kept: Kept) -> None:
    async def half() -> Any:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
        raise httpx.WriteError("gone")

    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with (
        gateway_in(kept, Answering(), runs=False) as gateway,
        client_of(gateway.edge) as http,
    ):
        with pytest.raises(httpx.WriteError):
            await http.post("/v1/files", content=half(), headers=headers)
        assert kept.num_contents() == 0


@pytest.mark.parametrize("num_waiting", [0, 5])
async def test_batch_whose_time_runs_out_has_more_lines_asked_at_once(
    kept: Kept, num_waiting: int
) -> None:
    """As long as few of them wait for an engine."""
    model = Answering()
    model.pace_s = 0.1
    config = {"lines_in_flight": 2, "completion_windows": ["1m"], "lease_s": 1.0}
    async with (
        gateway_in(kept, model, runs=False, config=config) as gateway,
        gateway.client() as client,
    ):
        others = OthersWork(num_batch_waiting=lambda: num_waiting)
        gateway.lane.start(gateway.edge.answer_line, others=others)
        batch_id = await begin(client, chats(10_000), completion_window="1m")
        if num_waiting:
            await turn_until(lambda: model.num_asked >= 20)
            assert model.most_running == 2
        else:
            await turn_until(lambda: model.most_running >= 16)
        await client.batches.cancel(batch_id)
        await ended(client, batch_id)
