"""Leases, versions, and waiting for a change."""

import asyncio
from dataclasses import replace

import pytest

from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import (
    LEASE_S,
    MAX_ENDED,
    RENEWAL_S,
    Directory,
    HostRecord,
    SliceRecord,
)
from serving.domain.supply.records import SupplyHost, SupplyRecord, SupplyState

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


# Its slice is taken away, and that was announced.
LEAVING = replace(record(state=SliceState.DRAINING, hosts=(HOST,)), drain_deadline_s=90.0)


def slice_on(node_id: str) -> SupplyRecord:
    host = SupplyHost(0, node_id=node_id)
    return SupplyRecord("s-0", "s-0", SupplyState.HELD, "", 0.0, "spot", "v6e", "2x2", 4, (host,))


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
        (record(state=SliceState.LOADING, hosts=(HOST,)), EndCause.REPLICA_LOST),
        (record(state=SliceState.READY, hosts=(HOST,)), EndCause.REPLICA_LOST),
        (record(state=SliceState.DRAINING, hosts=(HOST,)), EndCause.REPLICA_LOST),
        (LEAVING, EndCause.PREEMPTED),
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


@pytest.mark.parametrize(
    ("node_id", "cause"), [("node", EndCause.REPLICA_LOST), ("another", EndCause.PREEMPTED)]
)
def test_silence_takes_a_slice_away_only_where_its_hosts_are_gone(
    node_id: str, cause: EndCause
) -> None:
    directory = Directory("d")
    directory.renew(record(hosts=(HOST,)), now_s=0.0)
    directory.set_supply((slice_on(node_id),))
    directory.expire(LEASE_S, wall_s=50.0)
    assert [each.life.cause for each in directory.snapshot().ended] == [cause]


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


# -- engines that outlive their replica --

READY = replace(
    record(state=SliceState.READY, hosts=(HOST,)),
    engine_id="e",
    address=("10.0.0.1", 1),
    control=("10.0.0.1", 2),
    fingerprint="f",
)


def orphaned() -> Directory:
    directory = Directory("d")
    directory.renew(READY, now_s=100.0)
    directory.expire(100.0 + LEASE_S, wall_s=50.0)
    return directory


def test_engine_of_a_silent_replica_goes_on_being_listed() -> None:
    snapshot = orphaned().snapshot()
    (orphan,) = snapshot.records
    assert orphan.is_orphan
    assert orphan.life.reason == f"{SILENT}; the engine goes on"
    assert replace(orphan, life=READY.life, is_orphan=False) == READY
    assert snapshot.ended == ()


def test_replica_that_comes_back_has_its_engine_again() -> None:
    directory = orphaned()
    directory.renew(READY, now_s=106.0)
    assert directory.snapshot().records == (READY,)


def test_replica_that_takes_the_engine_over_ends_the_life_before() -> None:
    directory = orphaned()
    successor = replace(READY, replica_id="s")
    directory.renew(successor, now_s=106.0)
    snapshot = directory.snapshot()
    assert snapshot.records == (successor,)
    assert [(each.replica_id, each.life.cause) for each in snapshot.ended] == [
        ("r", EndCause.ADOPTED)
    ]
    # The one before was only slow, and has not learned of it yet.
    directory.renew(READY, now_s=107.0)
    assert directory.snapshot().records == (successor,)


def test_engine_that_its_replica_leaves_is_an_orphan_at_once() -> None:
    directory = Directory("d")
    part = replace(READY, replica_id="r+1", part=1, address=None)
    for each in (READY, part, replace(READY, replica_id="other", engine_id="o")):
        directory.renew(each, now_s=100.0)
    directory.hand_on("r")
    records = {each.replica_id: each.is_orphan for each in directory.snapshot().records}
    assert records == {"r": True, "r+1": True, "other": False}


def test_orphan_that_ends_is_among_the_ended() -> None:
    directory = orphaned()
    directory.end_orphan("r", EndCause.UNHEALTHY, "its process is gone", wall_s=60.0)
    directory.end_orphan("r", EndCause.UNHEALTHY, "once more", wall_s=61.0)
    snapshot = directory.snapshot()
    assert snapshot.records == ()
    (over,) = snapshot.ended
    assert (over.life.cause, over.life.reason) == (EndCause.UNHEALTHY, "its process is gone")
    assert not over.is_orphan


def test_replicas_that_are_late_are_known_before_their_lease_ends() -> None:
    directory = Directory("d")
    directory.renew(READY, now_s=100.0)
    assert directory.late(100.0 + 2 * RENEWAL_S) == ()
    assert directory.lives(100.0 + 2 * RENEWAL_S) == (READY,)
    assert directory.late(100.1 + 2 * RENEWAL_S) == (READY,)
    # It is only slow, as far as anybody knows.
    assert directory.lives(102.5) == (READY,)


def test_replica_of_which_only_a_note_is_known_is_late_until_it_renews() -> None:
    """Its successor asked a directory that had just started, and was given another slice."""
    directory = Directory("d")
    directory.remember(READY, now_s=100.0)
    assert directory.late(100.0) == (READY,)
    directory.renew(READY, now_s=100.5)
    assert directory.late(100.5) == ()


def test_successor_that_is_there_before_the_lease_has_run_out_needs_no_other_slice() -> None:
    directory = Directory("d")
    directory.renew(READY, now_s=100.0)
    waits = replace(record("s", SliceState.REQUESTED), fingerprint="f")
    directory.renew(waits, now_s=102.5)
    assert directory.lives(102.5) == (replace(READY, is_orphan=True), waits)
    assert directory.snapshot().records == (READY, waits)
    directory.renew(replace(waits, fingerprint="of a new version"), now_s=102.5)
    assert READY in directory.lives(102.5)


def test_last_word_of_a_replica_ends_its_orphan_too() -> None:
    directory = orphaned()
    directory.end(ended(READY, EndCause.RELEASED, 60.0, "the replica is leaving"))
    assert directory.snapshot().records == ()
