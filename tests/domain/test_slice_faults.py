"""What is held against slices: quarantine, and who is condemned. Pure."""

import pytest

from serving.domain.supply.faults import (
    FORGET_S,
    REPRIEVE_AFTER_S,
    FailedHosts,
    FaultCause,
    FaultsError,
    SliceFault,
    SliceFaults,
    decode_faults,
)

NODES = frozenset({"a", "b", "c", "d"})
OTHERS = frozenset({"w", "x", "y", "z"})
HOUR_S = 3600.0


def hosts(
    incarnation: str = "pod-0",
    nodes: frozenset[str] = NODES,
    machines: frozenset[str] = frozenset(),
    *,
    suspects: frozenset[str] = frozenset(),
    suspect_machines: frozenset[str] = frozenset(),
) -> FailedHosts:
    return FailedHosts(incarnation, "slice-0", nodes, machines, suspects, suspect_machines)


def of(faults: SliceFaults, failed: FailedHosts) -> SliceFault | None:
    return faults.of(failed.incarnation, failed.node_ids, failed.machines)


def until_s(faults: SliceFaults, failed: FailedHosts) -> float | None:
    fault = of(faults, failed)
    return None if fault is None else fault.until_s


def fail(
    faults: SliceFaults,
    failed: FailedHosts,
    at_s: float,
    cause: FaultCause = FaultCause.ENGINE,
    **options: object,
) -> SliceFault:
    given = {"model": "demo"} | options
    return faults.note_failure(failed, cause, "it broke", at_s, **given)  # type: ignore[arg-type]


def test_time_in_quarantine_doubles_up_to_an_hour() -> None:
    faults, now_s, times_s = SliceFaults(), 0.0, []
    for _ in range(10):
        end_s = fail(faults, hosts(), now_s).until_s
        times_s.append(end_s - now_s)
        now_s = end_s
    assert times_s == [30, 60, 120, 240, 480, 960, 1920, HOUR_S, HOUR_S, HOUR_S]


def test_a_thousand_failures_in_a_row_are_an_hour_each() -> None:
    faults, now_s = SliceFaults(), 0.0
    for _ in range(2000):
        now_s = fail(faults, hosts(), now_s).until_s
    assert fail(faults, hosts(), now_s).until_s == now_s + HOUR_S


def test_another_slice_of_the_same_name_is_not_held_to_account() -> None:
    faults = SliceFaults()
    fail(faults, hosts(), 0.0)
    assert of(faults, hosts("pod-9", OTHERS)) is None
    assert fail(faults, hosts("pod-9", OTHERS), 1.0).until_s == 31.0
    assert until_s(faults, hosts()) == 30.0
    assert fail(faults, hosts(), 40.0).until_s == 100.0


@pytest.mark.parametrize(("after_s", "time_s"), [(FORGET_S - 1, 60.0), (FORGET_S, 30.0)])
def test_failure_is_forgotten_after_a_day(after_s: float, time_s: float) -> None:
    faults = SliceFaults()
    fail(faults, hosts(), 0.0)
    assert fail(faults, hosts(), after_s).until_s == after_s + time_s


@pytest.mark.parametrize(("suspects", "is_kept"), [({"b"}, True), ({"a"}, False), (set(), False)])
def test_partly_replaced_slice_stays_while_it_has_the_host_that_failed(
    suspects: set[str], is_kept: bool
) -> None:
    faults = SliceFaults()
    fail(faults, hosts(suspects=frozenset(suspects)), 0.0)
    partly = hosts("pod-1", frozenset({"e", "b", "c", "d"}))
    assert (of(faults, partly) is not None) == is_kept
    assert fail(faults, partly, 1.0).until_s == (61.0 if is_kept else 31.0)


def test_replacement_on_the_same_machines_begins_with_the_quarantine_of_before() -> None:
    faults, machines = SliceFaults(), frozenset({"node-7"})
    for at_s in (0.0, 1.0, 2.0):
        fault = fail(faults, hosts("pod-0", NODES, machines), at_s, FaultCause.PROBE)
    assert fault.is_condemned
    replaced = of(faults, hosts("pod-1", OTHERS, machines))
    assert replaced is not None
    # It is not condemned in its turn, or the machine would be replaced by itself for ever.
    assert (replaced.count, replaced.is_condemned) == (3, False)
    assert of(faults, hosts("pod-2", OTHERS, frozenset({"node-8"}))) is None


def test_one_life_counts_once_whoever_reports_its_end() -> None:
    """The probe names the host, and the session reports its end a moment later."""
    faults = SliceFaults()
    probed = hosts(suspects=frozenset({"b"}))
    fail(faults, probed, 0.0, FaultCause.PROBE, life_id="r#1")
    fault = fail(faults, hosts(), 0.5, life_id="r#1")
    assert (fault.count, fault.hosts.suspects) == (1, {"b"})
    assert fail(faults, hosts(), 9.0, life_id="r#2").count == 2


def test_slice_whose_probe_fails_again_and_again_is_condemned() -> None:
    faults = SliceFaults()
    condemned = [
        fail(faults, hosts(), at_s, FaultCause.PROBE).is_condemned for at_s in (0.0, 1.0, 2.0)
    ]
    assert condemned == [False, False, True]
    fault = of(faults, hosts())
    assert fault is not None
    assert fault.reason == "it failed 3 times in a row, last: it broke"


def test_engine_failures_condemn_the_slice_if_the_model_serves_elsewhere() -> None:
    faults = SliceFaults()
    fail(faults, hosts("pod-5", OTHERS), 0.0)  # of the same model, once, on another slice
    for at_s in (1.0, 2.0):
        fail(faults, hosts(), at_s)
    fault = fail(faults, hosts(), 3.0, works_elsewhere=lambda model: model == "demo")
    assert fault.is_condemned
    assert fault.reason.endswith("demo serves on other slices")


def test_engine_failures_condemn_the_only_slice_that_was_tried() -> None:
    faults = SliceFaults()
    fail(faults, hosts("pod-5", OTHERS), 0.0, model="other")
    for at_s in (1.0, 2.0, 3.0):
        fault = fail(faults, hosts(), at_s)
    assert fault.is_condemned
    assert fault.reason.endswith("demo has failed on no other slice")


def test_model_that_works_nowhere_condemns_no_second_slice() -> None:
    """A wrong configuration must not have the whole fleet replaced."""
    faults = SliceFaults()
    for at_s in (1.0, 2.0, 3.0):
        first = fail(faults, hosts(), at_s)
    for at_s in (4.0, 5.0, 6.0, 7.0):
        second = fail(faults, hosts("pod-5", OTHERS), at_s)
    assert (first.is_condemned, second.is_condemned) == (True, False)


def test_success_clears_what_was_held_against_a_slice() -> None:
    faults = SliceFaults()
    fail(faults, hosts(), 0.0)
    faults.absolve(NODES)
    assert of(faults, hosts()) is None
    assert fail(faults, hosts(), 50.0).until_s == 80.0


def test_condemned_slice_is_not_absolved() -> None:
    faults = SliceFaults()
    faults.condemn(hosts(), "somebody said so", 0.0)
    faults.absolve(NODES)
    fault = of(faults, hosts())
    assert fault is not None
    assert (fault.is_condemned, fault.count, fault.reason) == (True, 0, "somebody said so")


def test_slice_that_was_not_taken_away_after_all_is_as_good_as_before() -> None:
    faults = SliceFaults()
    faults.condemn(hosts(), "maintenance", 0.0, ends_at_s=100.0)
    faults.forget(100.0 + REPRIEVE_AFTER_S - 1)
    assert of(faults, hosts()) is not None
    faults.forget(100.0 + REPRIEVE_AFTER_S)
    assert of(faults, hosts()) is None


def test_faults_survive_being_stored() -> None:
    faults = SliceFaults()
    assert not faults.is_dirty
    fail(faults, hosts(suspects=frozenset({"b"})), 10.0, life_id="r#1")
    faults.condemn(hosts("pod-9", OTHERS), "it goes", 20.0, ends_at_s=50.0)
    assert faults.is_dirty
    read = decode_faults(faults.encode())
    assert read.all() == faults.all()
    assert not read.is_dirty


@pytest.mark.parametrize("text", [b"", b"{}", b'[{"hosts": 1}]', b"\xff"])
def test_faults_of_another_version_are_refused(text: bytes) -> None:
    with pytest.raises(FaultsError, match="the faults of slices"):
        decode_faults(text)
