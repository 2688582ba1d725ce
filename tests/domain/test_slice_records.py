"""Leases, versions, and waiting for a change."""

import asyncio
from dataclasses import replace

import pytest

from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import LEASE_S, MAX_ENDED, Directory, HostRecord, SliceRecord

DEADLINE_S = 10.0
HOST = HostRecord(0, "node", "10.0.0.1", 4)
SILENT = "its replica was not heard of for 5 s"


def record(
    replica_id: str = "r",
    state: SliceState = SliceState.LOADING,
    *,
    began_at_s: float = 1.0,
    hosts: tuple[HostRecord, ...] = (),
) -> SliceRecord:
    life = SliceLifecycle((Transition(state, began_at_s, "the test says so"),))
    return SliceRecord(replica_id, "demo", "local", life, hosts=hosts)


def ended(record: SliceRecord, cause: EndCause, at_s: float, reason: str) -> SliceRecord:
    return replace(record, life=record.life.end(cause, at_s, reason))


def test_record_is_listed_until_its_lease_ends() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=100.0)
    directory.expire(100.0 + LEASE_S - 0.001, wall_s=50.0)
    assert directory.snapshot().records == (record(),)
    directory.expire(100.0 + LEASE_S, wall_s=50.0)
    assert directory.snapshot().records == ()


def test_renewal_extends_the_lease_without_a_new_version() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=100.0)
    version = directory.snapshot().version
    directory.renew(record(), now_s=104.0)
    directory.expire(104.0 + LEASE_S - 0.001, wall_s=50.0)
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
    directory.expire(1e9, wall_s=50.0)
    assert directory.snapshot().version == version


# -- what has ended --


def test_last_word_of_a_replica_moves_it_to_the_ended() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=0.0)
    version = directory.snapshot().version
    last = ended(record(), EndCause.RELEASED, 9.0, "the replica is leaving")
    directory.end(last)
    snapshot = directory.snapshot()
    assert (snapshot.records, snapshot.ended) == ((), (last,))
    assert snapshot.version != version
    directory.expire(1e9, wall_s=50.0)
    assert directory.snapshot() == snapshot


def test_life_that_has_not_ended_is_not_taken_for_ended() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=0.0)
    with pytest.raises(ValueError, match="loading, not gone"):
        directory.end(record())
    assert directory.snapshot().records == (record(),)


def test_forgotten_replica_leaves_no_ended_life() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=0.0)
    directory.forget("r")
    assert directory.snapshot().ended == ()


@pytest.mark.parametrize(
    ("silent", "cause"),
    [
        (record(state=SliceState.PROVISIONING), EndCause.RELEASED),
        (record(state=SliceState.READY, hosts=(HOST,)), EndCause.PREEMPTED),
        (record(state=SliceState.DRAINING, hosts=(HOST,)), EndCause.PREEMPTED),
        (record(state=SliceState.READY), EndCause.UNHEALTHY),
    ],
)
def test_silent_replica_ends_with_the_likeliest_cause(silent: SliceRecord, cause: EndCause) -> None:
    directory = Directory("d")
    directory.renew(silent, now_s=0.0)
    directory.expire(LEASE_S, wall_s=50.0)
    snapshot = directory.snapshot()
    assert snapshot.records == ()
    assert snapshot.ended == (ended(silent, cause, 50.0, SILENT),)


def test_replica_that_was_only_silent_is_back_with_its_life() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=0.0)
    directory.expire(LEASE_S, wall_s=50.0)
    directory.renew(record(), now_s=LEASE_S + 1)
    assert directory.snapshot().records == (record(),)
    assert directory.snapshot().ended == ()


def test_last_word_after_the_silence_replaces_what_was_presumed() -> None:
    directory = Directory("d")
    directory.renew(record(), now_s=0.0)
    directory.expire(LEASE_S, wall_s=50.0)
    last = ended(record(), EndCause.EXPIRED, 49.0, "its time was over")
    directory.end(last)
    assert directory.snapshot().ended == (last,)


def test_renewal_that_its_replicas_last_word_overtook_is_ignored() -> None:
    directory = Directory("d")
    last = ended(record(), EndCause.RELEASED, 9.0, "the replica is leaving")
    directory.end(last)
    directory.renew(record(), now_s=0.0)
    assert directory.snapshot().records == ()


def test_replica_that_lost_its_slice_lives_again_beside_its_ended_life() -> None:
    directory = Directory("d")
    last = ended(record(), EndCause.PREEMPTED, 9.0, "taken")
    following = record(began_at_s=9.0)
    directory.renew(following, now_s=0.0)
    directory.end(last)
    assert directory.snapshot().records == (following,)
    assert directory.snapshot().ended == (last,)


def test_only_the_latest_ended_lives_are_kept() -> None:
    directory = Directory("d")
    for number in range(MAX_ENDED + 3):
        directory.end(ended(record(f"r{number}"), EndCause.RELEASED, 9.0, "leaving"))
    kept = [each.replica_id for each in directory.snapshot().ended]
    assert kept == [f"r{number}" for number in range(3, MAX_ENDED + 3)]


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
