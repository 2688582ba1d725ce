"""A replacement takes the slice of the replica that it replaces, and no other one."""

from serving.domain.slice_lifecycle import SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.succession import REPORT_WAIT_S, num_successors, reason_to_wait


def record(replica_id: str, state: SliceState, at_s: float = 0.0, **changes: object) -> SliceRecord:
    life = SliceLifecycle(
        (Transition(state, at_s, "the test says so"),), slice_name=f"slice-of-{replica_id}"
    )
    given = {"model": "demo", "compute_class": "spot"} | changes
    return SliceRecord(replica_id=replica_id, life=life, **given)  # type: ignore[arg-type]


READY, DRAINING = SliceState.READY, SliceState.DRAINING
REQUESTED, PROVISIONING = SliceState.REQUESTED, SliceState.PROVISIONING
NOW_S = 5.0


def test_replacement_waits_for_the_slice_that_is_handed_over() -> None:
    records = [record("old", DRAINING), record("new", REQUESTED), record("other", READY)]
    reason = reason_to_wait(records, "new", NOW_S)
    assert reason == "it waits for the slice of a replica that leaves (slice-of-old)"
    assert num_successors(records) == 1


def test_replacement_takes_a_slice_once_the_old_replica_is_gone() -> None:
    assert reason_to_wait([record("new", REQUESTED), record("other", READY)], "new", NOW_S) is None


def test_slice_that_is_taken_away_is_waited_for_by_nobody() -> None:
    records = [record("old", DRAINING, drain_deadline_s=30.0), record("next", REQUESTED)]
    assert reason_to_wait(records, "next", NOW_S) is None
    assert num_successors(records) == 0


def test_of_those_that_wait_the_last_to_come_wait_for_what_is_handed_over() -> None:
    records = [
        record("early", PROVISIONING, 1.0),
        record("late", REQUESTED, 2.0),
        record("old", DRAINING),
    ]
    assert reason_to_wait(records, "early", NOW_S) is None
    assert reason_to_wait(records, "late", NOW_S) is not None


def test_other_deployments_are_of_no_matter() -> None:
    for changes in ({"model": "another"}, {"compute_class": "reserved"}):
        records = [record("old", DRAINING, **changes), record("new", REQUESTED)]
        assert reason_to_wait(records, "new", NOW_S) is None


def test_replica_waits_until_the_directory_has_its_record() -> None:
    """Its request for a slice may overtake its first report."""
    others = [record("old", DRAINING)]
    assert reason_to_wait(others, "new", NOW_S) == "the directory has no record of the replica yet"
    records = [record("other", READY), record("new", REQUESTED)]
    assert reason_to_wait(records[:1], "new", NOW_S) is not None
    assert reason_to_wait(records, "new", NOW_S) is None


def test_more_leave_than_wait_when_the_deployment_shrinks() -> None:
    assert num_successors([record("a", DRAINING), record("b", DRAINING)]) == 0
    assert (
        num_successors([record("a", DRAINING), record("b", DRAINING), record("c", REQUESTED)]) == 1
    )


def test_replica_of_a_new_version_waits_for_the_word_of_an_old_one() -> None:
    """Serve starts it at the moment at which it tells the old one to stop."""
    old = record("old", READY, version="v1")
    new = record("new", REQUESTED, 100.0, version="v2")
    assert reason_to_wait([old, new], "new", 100.0 + REPORT_WAIT_S - 0.1) == (
        "it may be the replacement of a replica of version v1"
    )
    # Nobody leaves: the deployment has grown.
    assert reason_to_wait([old, new], "new", 100.0 + REPORT_WAIT_S) is None


def test_word_is_not_waited_for_where_no_old_replica_holds_a_slice() -> None:
    new = record("new", REQUESTED, 100.0, version="v2")
    for other in (
        record("same", READY, version="v2"),
        record("next", REQUESTED, 101.0, version="v1"),
        record("taken", DRAINING, drain_deadline_s=130.0, version="v1"),
        record("other", READY, version="v1", compute_class="reserved"),
        record("unknown", READY, version=""),
    ):
        assert reason_to_wait([other, new], "new", 100.0) is None


def test_replica_of_a_rollback_waits_for_the_word_of_one_that_has_no_slice_yet() -> None:
    """Else both would take one: the replaced replica before it is told to leave."""
    stays = record("stays", READY, version="v1")
    replaced = record("replaced", REQUESTED, 100.0, version="v2")
    back = record("back", REQUESTED, 104.0, version="v1")
    assert reason_to_wait([stays, replaced, back], "back", 104.0 + REPORT_WAIT_S - 0.1) == (
        "it may be the replacement of a replica of version v2"
    )
    # It leaves, without a slice or with one.
    leaves = record("replaced", DRAINING, 100.0, version="v2")
    assert reason_to_wait([stays, leaves, back], "back", 105.0) is not None
    assert reason_to_wait([stays, back], "back", 106.0) is None
