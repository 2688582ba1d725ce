"""Batches that have ended stay their time and go; lists that are at one of them go on."""

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from serving.gateway.batches.records import (
    Batch,
    BatchStatus,
    FilePurpose,
    LineFault,
    cancelled,
    outcome_of,
    validated,
)
from serving.gateway.batches.sqlite.store import SqliteBatchStore
from serving.gateway.batches.store import MAX_SWEPT, BatchStore
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT

from .kept import Kept
from .lanes import Answering, begin, chats, ended, gateway_in, turn_until, upload
from .test_batch_stores import MANY, add_batch, begun, claimed, stored_file, to

LIFETIME_S = 1000.0
ENDED_AT_S = 1.0
DUE_S = ENDED_AT_S + LIFETIME_S
OUTPUT = "file-out"


def end(store: BatchStore, batch_id: str, tenant: str = "a", at_s: float = ENDED_AT_S) -> None:
    """Takes a batch in, and ends it without an answer."""
    add_batch(store, batch_id, tenant)
    store.change(tenant, batch_id, to(cancelled))
    lease = claimed(store)
    assert lease.batch_id == batch_id, "another batch waits for an owner"
    store.end(lease, [], lambda batch: batch.enter(outcome_of(batch), at_s))


def end_with_output(store: BatchStore, expires_at_s: float | None) -> None:
    """Ends batch b1 with a file of answers."""
    add_batch(store)
    lease = begun(store)
    content = store.new_content()
    content.write(b"{}\n")
    file = stored_file(OUTPUT, b"{}\n", purpose=FilePurpose.BATCH_OUTPUT, expires_at_s=expires_at_s)

    def completed(batch: Batch) -> Batch:
        return replace(batch.enter(BatchStatus.COMPLETED, ENDED_AT_S), output_file_id=OUTPUT)

    store.end(lease, [(file, content)], completed)


def ids(store: BatchStore, tenant: str = "a") -> list[str]:
    return [batch.batch_id for batch in store.batches(tenant, MANY)]


def test_batch_goes_when_its_time_after_its_end_is_over(store: BatchStore) -> None:
    end(store, "b1")
    end(store, "later", at_s=ENDED_AT_S + 1)
    add_batch(store, "runs")
    assert store.sweep(DUE_S - 0.5, LIFETIME_S).batch_ids == []
    swept = store.sweep(DUE_S, LIFETIME_S)
    assert (swept.batch_ids, swept.has_more) == (["b1"], False)
    assert store.batch("a", "b1") is None
    assert ids(store) == ["runs", "later"]
    assert store.sweep(DUE_S + 1, LIFETIME_S).batch_ids == ["later"]
    assert store.sweep(1e12, LIFETIME_S).batch_ids == []
    assert ids(store) == ["runs"]


def test_batch_that_failed_goes_too(store: BatchStore) -> None:
    add_batch(store)
    store.change_leased(claimed(store), to(validated, 1, (LineFault("c", "wrong"),)))
    assert store.sweep(DUE_S, LIFETIME_S).batch_ids == ["b1"]


def test_batch_stays_as_long_as_its_files_of_answers(store: BatchStore) -> None:
    end_with_output(store, DUE_S + 500.0)
    assert store.sweep(DUE_S, LIFETIME_S).batch_ids == []
    assert store.sweep(DUE_S + 499.0, LIFETIME_S).batch_ids == []
    swept = store.sweep(DUE_S + 500.0, LIFETIME_S)
    assert (swept.file_ids, swept.batch_ids) == ([OUTPUT], ["b1"])


def test_batch_stays_with_a_file_that_does_not_expire_until_that_is_deleted(
    store: BatchStore,
) -> None:
    end_with_output(store, None)
    assert store.sweep(DUE_S, LIFETIME_S).batch_ids == []
    assert store.sweep(DUE_S + LIFETIME_S, LIFETIME_S).batch_ids == []
    store.delete_file("a", OUTPUT, 0.0)
    assert store.sweep(DUE_S + 2 * LIFETIME_S, LIFETIME_S).batch_ids == ["b1"]


def test_batch_goes_in_its_time_if_its_files_are_gone_before(store: BatchStore) -> None:
    end_with_output(store, DUE_S - 1)
    assert store.sweep(DUE_S - 1, LIFETIME_S).file_ids == [OUTPUT]
    assert ids(store) == ["b1"]
    assert store.sweep(DUE_S, LIFETIME_S).batch_ids == ["b1"]


def test_time_of_a_batch_is_that_of_its_end_after_a_restart(kept: Kept) -> None:
    first = kept.open()
    end(first, "b1")
    first.sweep(ENDED_AT_S, LIFETIME_S)
    end(first, "b2")
    first.close()
    second = kept.open()
    shorter_s = LIFETIME_S / 2
    # Only the one that no sweep had seen has the time that is set now.
    assert second.sweep(ENDED_AT_S + shorter_s, shorter_s).batch_ids == ["b2"]
    second.close()
    third = kept.open()
    assert third.sweep(DUE_S, shorter_s).batch_ids == ["b1"]
    third.close()


def test_one_sweep_deletes_no_more_than_its_part(store: BatchStore) -> None:
    num_batches = MAX_SWEPT + 3
    for number in range(num_batches):
        end(store, f"b{number}")
    first = store.sweep(DUE_S, LIFETIME_S)
    assert (len(first.batch_ids), first.has_more) == (MAX_SWEPT, True)
    second = store.sweep(DUE_S, LIFETIME_S)
    assert (len(second.batch_ids), second.has_more) == (3, False)
    assert ids(store) == []


def test_two_gateways_delete_each_batch_once(kept: Kept, store: BatchStore) -> None:
    for number in range(50):
        end(store, f"b{number}")
    other = kept.open()
    with ThreadPoolExecutor(2) as threads:
        swept = list(
            threads.map(lambda each: each.sweep(DUE_S, LIFETIME_S).batch_ids, [store, other] * 4)
        )
    assert sorted(batch_id for batch_ids in swept for batch_id in batch_ids) == sorted(
        f"b{number}" for number in range(50)
    )
    assert ids(other) == []
    other.close()


def test_owner_that_comes_late_to_a_batch_that_is_gone_has_lost_it(
    store: BatchStore,
) -> None:
    add_batch(store)
    lease = claimed(store)
    store.change("a", "b1", to(cancelled))
    store.end(lease, [], lambda batch: batch.enter(BatchStatus.CANCELLED, ENDED_AT_S))
    assert store.sweep(DUE_S, LIFETIME_S).batch_ids == ["b1"]
    store.release(lease)
    assert ids(store) == []


def test_batches_of_an_earlier_build_go_in_their_time(tmp_path: Path) -> None:
    opened = SqliteBatchStore(tmp_path)
    end(opened, "b1")
    opened.close()
    # As that build had left it.
    database = sqlite3.connect(tmp_path / "batches.sqlite", isolation_level=None)
    for statement in (
        "DROP INDEX batches_without_time",
        "DROP INDEX batches_by_time",
        "DROP TABLE gone",
        "ALTER TABLE batches DROP COLUMN keep_until_s",
    ):
        database.execute(statement)
    database.close()
    opened = SqliteBatchStore(tmp_path)
    assert ids(opened) == ["b1"]
    assert opened.sweep(DUE_S, LIFETIME_S).batch_ids == ["b1"]
    opened.close()


@pytest.mark.parametrize("order", ["desc", "asc"])
async def test_list_goes_on_while_batches_go(kept: Kept, order: str) -> None:
    """Of the rest of the list nothing is left out, and nothing comes twice."""
    store = kept.open()
    every = [f"b{number}" for number in range(9)]
    for number, batch_id in enumerate(every):
        if number % 3 == 0:
            add_batch(store, batch_id, DEFAULT_TENANT)
            claimed(store)  # it runs, and stays
        else:
            end(store, batch_id, DEFAULT_TENANT)
    async with gateway_in(kept, Answering(), runs=False) as gateway, gateway.client() as client:
        wanted = every if order == "asc" else every[::-1]
        page = await client.batches.list(limit=2, extra_query={"order": order})
        seen = [batch.id for batch in page.data]
        assert seen == wanted[:2]
        store.sweep(DUE_S, LIFETIME_S)
        assert ids(store, DEFAULT_TENANT) == ["b6", "b3", "b0"]
        while page.has_next_page():
            page = await page.get_next_page()
            seen += [batch.id for batch in page.data]
        assert seen == wanted[:2] + [each for each in wanted[2:] if each in ("b0", "b3", "b6")]
    store.close()


def test_place_of_a_record_that_is_gone_is_forgotten(store: BatchStore) -> None:
    for number in range(3):
        add_batch(store, f"b{number}")
        claimed(store)
    for number in range(2):
        end(store, f"over-{number}")
    page = replace(MANY, after="over-0")
    store.sweep(DUE_S, LIFETIME_S)
    assert [batch.batch_id for batch in store.batches("a", page)] == ["b2", "b1", "b0"]
    assert store.batches("b", page) == []
    store.sweep(DUE_S + 3601.0, LIFETIME_S)
    assert store.batches("a", page) == []


async def test_files_are_deleted_page_by_page(kept: Kept) -> None:
    async with gateway_in(kept, Answering(), runs=False) as gateway, gateway.client() as client:
        files = [await upload(client, b"{}\n") for _ in range(5)]
        deleted = []
        async for file in await client.files.list(limit=2):
            await client.files.delete(file.id)
            deleted.append(file.id)
        assert deleted == files[::-1]


async def test_lane_deletes_what_has_had_its_time(kept: Kept) -> None:
    """More than one sweep may delete, and while another gateway answers a batch."""
    store = kept.open()
    for number in range(MAX_SWEPT + 3):
        end(store, f"b{number}", DEFAULT_TENANT, at_s=time.time() - 3600.0)
    model = Answering()
    model.may_answer.clear()
    config = {"batch_lifetime_s": 60.0}
    async with (
        gateway_in(kept, model, "gw-1", config=config) as gateway,
        gateway_in(kept, model, "gw-2", config=config),
        gateway.client() as client,
    ):
        batch_id = await begin(client, chats(2))
        await turn_until(lambda: ids(store, DEFAULT_TENANT) == [batch_id])
        model.may_answer.set()
        batch = await ended(client, batch_id)
    assert batch.status == "completed"
    assert batch.request_counts.completed == 2
    store.close()
