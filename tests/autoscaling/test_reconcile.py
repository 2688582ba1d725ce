"""The loop: what it does with failures, with the fence, and when it is told to stop."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from provisioning_builders import (
    RESERVED,
    Entry,
    carried_out,
    group,
    holding,
    no_fence,
    no_report,
    report_of,
    waiting,
)

from autoscaling.provisioning.errors import (
    OutdatedError,
    ProvisioningError,
    RecordsUnavailableError,
    ThrottledError,
    UnreachableError,
)
from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.plan import (
    Change,
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
)
from autoscaling.provisioning.protocol import ClusterObservation
from autoscaling.provisioning.reconcile import (
    MAX_BACKOFF_S,
    MAX_RECORDS_BACKOFF_S,
    Reconciler,
    due_in_s,
)
from serving.domain.supply.pods import GroupPods, ObservedSlice
from serving.domain.supply.records import SupplyReport

RULES = ProvisioningRules(idle_s=60.0, min_change_interval_s=0.0)
DEADLINE_S = 10.0


class FakeProvisioner:
    """Groups that do at once what is asked; fails on command; `gate` holds a change up."""

    def __init__(self, *groups: WorkerGroup) -> None:
        self.groups = list(groups)
        self.notes: tuple[str, ...] = ()
        self.failures: list[Exception] = []
        self.refused: set[str] = set()
        self.retry_after_s: float | None = None
        self.num_attempts = 0
        self.num_looks = 0
        self.refusal: ProvisioningError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_applying = asyncio.Event()

    async def observe(self) -> ClusterObservation:
        self.num_looks += 1
        if self.failures:
            raise self.failures.pop(0)
        return ClusterObservation(tuple(self.groups), self.notes)

    async def catch_up(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def apply(self, plan: ProvisioningPlan) -> None:
        self.is_applying.set()
        self.num_attempts += 1
        await self.gate.wait()
        for change in plan.changes:
            if change.group.name in self.refused:
                raise OutdatedError(f"{change.group.name} has changed", self.retry_after_s)
        self.groups = carried_out(self.groups, plan)


class Rig:
    """A reconciler with records, a clock and a fence that the test holds."""

    def __init__(
        self,
        provisioner: FakeProvisioner,
        interval_s: float = 0.01,
        look_interval_s: float = 0.01,
    ) -> None:
        self.entries: list[Entry] = []
        self.reported: list[tuple[GroupPods, ...]] = []
        self.now_s = 0.0
        self.busy: set[str] = set()
        self.asked: list[str] = []
        self.num_reads = 0
        self.num_times = 0
        self.failure: Exception | None = None
        self.provisioner = provisioner
        self.changed = asyncio.Event()
        self.fence_gate = asyncio.Event()
        self.fence_gate.set()
        self.reconciler = Reconciler(
            self._read,
            provisioner,
            RULES,
            fence=self._fence,
            report_pods=self._report,
            interval_s=interval_s,
            look_interval_s=look_interval_s,
            changed=self.changed,
            clock=self._clock,
        )

    def _clock(self) -> float:
        self.num_times += 1
        return self.now_s

    async def _read(self) -> SupplyReport:
        self.num_reads += 1
        if self.failure is not None:
            raise self.failure
        return report_of(self.entries, self.provisioner.groups)

    async def _report(self, groups: tuple[GroupPods, ...]) -> None:
        self.reported.append(groups)

    async def _fence(self, each: ObservedSlice) -> str | None:
        await self.fence_gate.wait()
        self.asked.append(each.name)
        return "host 0 is in use" if each.name in self.busy else None


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - what is awaited is somebody else's state
            await asyncio.sleep(0.005)


async def stop(task: "asyncio.Task[None]") -> None:
    """One word is enough: whoever waited for it with a limit would cancel it once more."""
    task.cancel()
    ended, _ = await asyncio.wait({task}, timeout=DEADLINE_S)
    assert ended
    assert task.cancelled()


async def test_loop_goes_on_after_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    provisioner = FakeProvisioner(group())
    provisioner.failures = [UnreachableError("the API server is down"), RuntimeError("a fault")]
    rig = Rig(provisioner)
    rig.entries = [waiting()]
    task = asyncio.create_task(rig.reconciler.run())
    await until(lambda: provisioner.groups[0].replicas == 1)
    await stop(task)
    assert "the API server is down" in caplog.text
    assert "a fault" in caplog.text


async def test_failure_of_the_directory_plans_nothing() -> None:
    async def read() -> SupplyReport:
        raise RecordsUnavailableError("no directory")

    provisioner = FakeProvisioner(group("s-0", replicas=3))
    reconciler = Reconciler(
        read, provisioner, RULES, fence=no_fence, report_pods=no_report, interval_s=1.0
    )
    with pytest.raises(RecordsUnavailableError):
        await reconciler.tick()
    assert not provisioner.is_applying.is_set()


async def test_directory_learns_of_pods_before_it_is_asked() -> None:
    """Or a directory that has just started would wait for us, and we for it."""
    made = group("s-0", name="v6e-2x4-spot", zone="us-a")
    rig = Rig(FakeProvisioner(made))
    rig.entries = [holding("s-0")]
    await rig.reconciler.tick()
    (told,) = rig.reported[0]
    assert (told.group, told.compute_class, told.zone) == ("v6e-2x4-spot", "spot", "us-a")
    assert told.slices == made.slices


@pytest.mark.parametrize(
    ("failures", "delay_s"),
    [
        ([RecordsUnavailableError("no directory")] * 20, MAX_RECORDS_BACKOFF_S),
        ([UnreachableError("down")], 2.0),
        ([UnreachableError("down")] * 3, 8.0),
        ([UnreachableError("down")] * 20, MAX_BACKOFF_S),
        ([ThrottledError("slow down", 30.0)], 30.0),
        ([ThrottledError("slow down", 90.0)], 90.0),
        ([UnreachableError("down"), None], 1.0),
        ([UnreachableError("down"), None, UnreachableError("down")], 2.0),
    ],
)
async def test_wait_after_failures(
    failures: list[ProvisioningError | None], delay_s: float
) -> None:
    """Twice as long each time, or as the server asks for; as at first after a success."""
    provisioner = FakeProvisioner(group())
    rig = Rig(provisioner, interval_s=1.0)
    for failure in failures:
        provisioner.failures = [] if failure is None else [failure]
        waited_s = await rig.reconciler.attempt()
    assert waited_s == delay_s


async def test_slice_that_the_fence_keeps_is_not_dropped() -> None:
    provisioner = FakeProvisioner(group("s-0", "s-1"))
    rig = Rig(provisioner)
    rig.busy = {"s-1"}
    await rig.reconciler.tick()
    rig.now_s = 60.0
    plan = await rig.reconciler.tick()
    assert [drop.slice.name for change in plan.changes for drop in change.drops] == ["s-0"]
    assert [each.name for each in provisioner.groups[0].slices] == ["s-1"]
    assert provisioner.groups[0].replicas == 1
    assert set(rig.asked) == {"s-0", "s-1"}


async def test_slice_that_a_replica_has_is_not_even_asked_about() -> None:
    rig = Rig(FakeProvisioner(group("s-0")))
    rig.entries = [holding("s-0")]
    for rig.now_s in (0.0, 60.0, 120.0):
        await rig.reconciler.tick()
    assert rig.asked == []


async def test_cancelled_loop_finishes_the_change_that_it_has_begun() -> None:
    provisioner = FakeProvisioner(group())
    provisioner.gate.clear()
    rig = Rig(provisioner)
    rig.entries = [waiting()]
    task = asyncio.create_task(rig.reconciler.run())
    await provisioner.is_applying.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    provisioner.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provisioner.groups[0].replicas == 1


async def test_cancelled_loop_that_waits_ends_at_once() -> None:
    provisioner = FakeProvisioner(group())
    task = asyncio.create_task(Rig(provisioner, interval_s=1000.0).reconciler.run())
    await until(lambda: provisioner.num_looks == 1)
    async with asyncio.timeout(1.0):
        await stop(task)


async def test_loop_that_is_cancelled_as_the_cluster_changes_ends_too() -> None:
    rig = Rig(FakeProvisioner(group()), interval_s=FOREVER_S, look_interval_s=FOREVER_S)
    task = asyncio.create_task(rig.reconciler.run())
    # The round, and how long to wait for the next: then it waits.
    await until(lambda: rig.num_times == 2)
    rig.changed.set()
    await stop(task)


async def test_log_has_one_line_per_change_with_its_arithmetic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(FakeProvisioner(group(max_replicas=2)))
    rig.entries = [waiting(), waiting(), waiting()]
    for _ in range(3):
        await rig.reconciler.tick()
    changes = [line for line in caplog.messages if line.startswith("slices_changed")]
    assert len(changes) == 1
    assert "group=spot-group from=0 to=2" in changes[0]
    assert "3 waiting" in changes[0]
    # What stays refused is said once.
    refusals = [line for line in caplog.messages if line.startswith("slices_refused")]
    assert len(refusals) == 1
    assert "maxReplicas is 2: 1 refused" in refusals[0]


async def test_log_says_what_could_not_be_used_until_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    provisioner = FakeProvisioner(group())
    rig = Rig(provisioner)
    for provisioner.notes in (("it is suspended",), ("it is suspended",), (), ("it is suspended",)):
        await rig.reconciler.tick()
    assert caplog.text.count("it is suspended") == 2


FOREVER_S = 1e6


async def test_changed_cluster_and_a_new_report_each_start_a_round() -> None:
    """Long before anything else would."""
    provisioner = FakeProvisioner(group())
    rig = Rig(provisioner, interval_s=FOREVER_S, look_interval_s=FOREVER_S)
    task = asyncio.create_task(rig.reconciler.run())
    await until(lambda: provisioner.num_looks == 1)
    for num_looks in (2, 3):
        rig.changed.set()
        await until(lambda: provisioner.num_looks == num_looks)  # noqa: B023
    await stop(task)

    rig = Rig(provisioner, interval_s=FOREVER_S)
    task = asyncio.create_task(rig.reconciler.run())
    await until(lambda: rig.num_reads > 3)
    rig.entries = [waiting()]
    await until(lambda: provisioner.groups[0].replicas == 1)
    await stop(task)


async def test_change_during_a_round_starts_another() -> None:
    provisioner = FakeProvisioner(group())
    provisioner.gate.clear()
    rig = Rig(provisioner, interval_s=FOREVER_S, look_interval_s=FOREVER_S)
    rig.entries = [waiting()]
    task = asyncio.create_task(rig.reconciler.run())
    await provisioner.is_applying.wait()
    rig.changed.set()
    provisioner.gate.set()
    await until(lambda: provisioner.num_looks == 2)
    await stop(task)


async def test_looks_that_find_nothing_new_start_no_round_and_still_report() -> None:
    provisioner = FakeProvisioner(group("s-0"))
    rig = Rig(provisioner, interval_s=FOREVER_S)
    rig.entries = [holding("s-0")]
    task = asyncio.create_task(rig.reconciler.run())
    await until(lambda: rig.num_reads > 1)
    num_plans, num_reports = rig.num_times, len(rig.reported)
    await until(lambda: rig.num_reads > 10)
    assert rig.num_times == num_plans
    # The directory has to see that we live.
    assert len(rig.reported) > num_reports
    await stop(task)


@pytest.mark.parametrize(
    "failure", [RecordsUnavailableError("no directory"), RuntimeError("no directory")]
)
async def test_failure_to_read_records_between_rounds_is_reported_by_the_next(
    caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    provisioner = FakeProvisioner(group())
    rig = Rig(provisioner, interval_s=FOREVER_S)
    task = asyncio.create_task(rig.reconciler.run())
    await until(lambda: rig.num_reads > 1)
    rig.failure = failure
    await until(lambda: "no directory" in caplog.text)
    await stop(task)


@pytest.mark.parametrize(
    ("memory", "expected_s"),
    [
        (PlannerState(), 10.0),
        (PlannerState(changed_at_s={"a": 98.0, "b": 99.0}), 3.0),
        (PlannerState(changed_at_s={"a": 95.0, "b": 10.0}), 10.0),
        (PlannerState(unwanted_since_s={"pod-0": 41.5, "pod-1": 90.0}), 1.5),
        (PlannerState(unwanted_since_s={"pod-0": 72.0}), 2.0),
        (PlannerState({"pod-0": 42.0}, {}, {"a": 96.0}), 1.0),
    ],
)
def test_round_is_due_when_a_delay_of_the_rules_is_over(
    memory: PlannerState, expected_s: float
) -> None:
    rules = ProvisioningRules(idle_s=60.0, min_change_interval_s=5.0)
    assert due_in_s(memory, rules, 100.0, 10.0) == expected_s


async def test_group_whose_change_is_refused_does_not_hold_up_the_others() -> None:
    provisioner = FakeProvisioner(group(), group(kind=RESERVED))
    provisioner.refused = {"reserved-group"}
    rig = Rig(provisioner)
    rig.entries = [waiting(), waiting(RESERVED)]
    with pytest.raises(OutdatedError, match="reserved-group"):
        await rig.reconciler.tick()
    assert [each.replicas for each in provisioner.groups] == [1, 0]


async def test_slices_are_added_before_hosts_are_asked_whether_another_may_go() -> None:
    provisioner = FakeProvisioner(group("s-0"), group(kind=RESERVED))
    rig = Rig(provisioner)
    await rig.reconciler.tick()
    rig.now_s, rig.entries = 60.0, [waiting(RESERVED)]
    rig.fence_gate.clear()
    task = asyncio.create_task(rig.reconciler.tick())
    await until(lambda: provisioner.groups[1].replicas == 1)
    assert provisioner.groups[0].replicas == 1
    rig.fence_gate.set()
    await task
    assert provisioner.groups[0].replicas == 0


async def test_directory_hears_from_us_while_a_refused_change_waits() -> None:
    provisioner = FakeProvisioner(group())
    provisioner.refused, provisioner.retry_after_s = {provisioner.groups[0].name}, FOREVER_S
    rig = Rig(provisioner)
    rig.entries = [waiting()]
    task = asyncio.create_task(rig.reconciler.run())
    await until(lambda: provisioner.num_attempts == 1)
    num_reports = len(rig.reported)
    rig.entries = [waiting(), waiting()]
    rig.changed.set()
    await until(lambda: len(rig.reported) > num_reports + 5)
    assert provisioner.num_attempts == 1
    await stop(task)


async def test_change_that_is_not_taken_holds_up_no_slice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    provisioner = FakeProvisioner(group())
    provisioner.refusal = OutdatedError("the cluster has changed meanwhile")
    rig = Rig(provisioner)
    rig.entries = [waiting()]
    for _ in range(2):
        await rig.reconciler.tick()
    assert provisioner.groups[0].replicas == 1
    told = "what was applied does not take effect: the cluster has changed meanwhile"
    assert caplog.text.count(told) == 1


class Witness:
    """An observer that writes down what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def observed(self, observation: ClusterObservation) -> None:
        self.told.append(f"observed {len(observation.groups)}")

    def reported(self, report: SupplyReport) -> None:
        self.told.append(f"reported {len(report.waiting)}")

    def changed(self, change: Change) -> None:
        self.told.append(f"changed to {change.replicas}")

    def done(self, plan: ProvisioningPlan) -> None:
        self.told.append(f"done {len(plan.changes)}")

    def failed(self, error: Exception) -> None:
        self.told.append(f"failed {type(error).__name__}")


async def test_observer_is_told_of_a_round_and_of_why_another_one_failed() -> None:
    provisioner, witness = FakeProvisioner(group()), Witness()

    async def read() -> SupplyReport:
        return report_of([waiting()], provisioner.groups)

    reconciler = Reconciler(
        read,
        provisioner,
        RULES,
        fence=no_fence,
        report_pods=no_report,
        interval_s=1.0,
        observer=witness,
    )
    await reconciler.attempt()
    assert witness.told == ["observed 1", "reported 1", "changed to 1", "done 1"]
    witness.told.clear()
    provisioner.failures = [UnreachableError("away")]
    await reconciler.attempt()
    provisioner.failures = [RuntimeError("a fault")]
    await reconciler.attempt()
    assert witness.told == ["failed UnreachableError", "failed RuntimeError"]


async def test_change_that_was_refused_is_not_told_as_made() -> None:
    provisioner, witness = FakeProvisioner(group()), Witness()
    provisioner.refused = {group().name}

    async def read() -> SupplyReport:
        return report_of([waiting()], provisioner.groups)

    reconciler = Reconciler(
        read,
        provisioner,
        RULES,
        fence=no_fence,
        report_pods=no_report,
        interval_s=1.0,
        observer=witness,
    )
    await reconciler.attempt()
    assert witness.told == ["observed 1", "reported 1", "failed OutdatedError"]
