"""Leases, versions, and waiting for a change."""

import asyncio

from serving.directory import LEASE_S, Directory, EngineRecord, SliceState

DEADLINE_S = 10.0


def record(replica_id: str = "r", state: SliceState = SliceState.LOADING) -> EngineRecord:
    return EngineRecord(replica_id, "demo", "local", state, since_s=1.0)


def test_record_is_listed_until_its_lease_ends() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=100.0)
    directory.expire(100.0 + LEASE_S - 0.001)
    assert directory.snapshot().records == (record(),)
    directory.expire(100.0 + LEASE_S)
    assert directory.snapshot().records == ()


def test_renewal_extends_the_lease_without_a_new_version() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=100.0)
    version = directory.snapshot().version
    directory.renew(record(), now_s=104.0)
    directory.expire(104.0 + LEASE_S - 0.001)
    assert directory.snapshot().version == version
    assert directory.snapshot().records == (record(),)


def test_every_change_of_a_record_is_a_new_version() -> None:
    directory = Directory("d")
    versions = [directory.snapshot().version]
    directory.renew(record(), now_s=0.0)
    versions.append(directory.snapshot().version)
    directory.renew(record(state=SliceState.READY), now_s=0.0)
    versions.append(directory.snapshot().version)
    directory.forget("r")
    versions.append(directory.snapshot().version)
    assert len(set(versions)) == 4


def test_forgetting_the_unknown_changes_nothing() -> None:
    directory = Directory("d")
    version = directory.snapshot().version
    directory.forget("nobody")
    directory.expire(1e9)
    assert directory.snapshot().version == version


def test_versions_of_two_directories_differ() -> None:
    assert Directory("before").snapshot().version != Directory("after").snapshot().version


async def test_wait_returns_at_once_for_a_version_that_is_not_the_present_one() -> None:
    directory = Directory("after")
    async with asyncio.timeout(DEADLINE_S):
        snapshot = await directory.wait_change("before:7", timeout_s=10 * DEADLINE_S)
    assert snapshot == directory.snapshot()


async def test_every_waiter_learns_of_a_change() -> None:
    directory = Directory("d")
    version = directory.snapshot().version
    waiters = [
        asyncio.create_task(directory.wait_change(version, 10 * DEADLINE_S)) for _ in range(3)
    ]
    await asyncio.sleep(0)
    directory.renew(record(), now_s=0.0)
    async with asyncio.timeout(DEADLINE_S):
        snapshots = await asyncio.gather(*waiters)
    assert [snapshot.records for snapshot in snapshots] == [(record(),)] * 3


async def test_wait_without_a_change_returns_the_present_snapshot() -> None:
    directory = Directory("d")
    version = directory.snapshot().version
    async with asyncio.timeout(DEADLINE_S):
        snapshot = await directory.wait_change(version, timeout_s=0.01)
    assert snapshot.version == version
