"""The loop: what it does with failures, with the fence, and when it is told to stop."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from provisioning_builders import carried_out, group, holding, no_fence, waiting

from autoscaling.provisioning.errors import (
    ProvisioningError,
    RecordsUnavailableError,
    ThrottledError,
    UnreachableError,
)
from autoscaling.provisioning.groups import ObservedSlice, WorkerGroup
from autoscaling.provisioning.plan import ProvisioningPlan, ProvisioningRules
from autoscaling.provisioning.protocol import ClusterObservation
from autoscaling.provisioning.reconcile import MAX_BACKOFF_S, Reconciler
from serving.domain.slice_records import SliceRecord

RULES = ProvisioningRules(idle_s=60.0, min_change_interval_s=0.0)
DEADLINE_S = 10.0


class FakeProvisioner:
    """Groups that do at once what is asked; fails on command; `gate` holds a change up."""

    def __init__(self, *groups: WorkerGroup) -> None:
        self.groups = list(groups)
        self.notes: tuple[str, ...] = ()
        self.failures: list[Exception] = []
        self.num_looks = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_applying = asyncio.Event()

    async def observe(self) -> ClusterObservation:
        self.num_looks += 1
        if self.failures:
            raise self.failures.pop(0)
        return ClusterObservation(tuple(self.groups), self.notes)

    async def apply(self, plan: ProvisioningPlan) -> None:
        self.is_applying.set()
        await self.gate.wait()
        self.groups = carried_out(self.groups, plan)


class Rig:
    """A reconciler with records, a clock and a fence that the test holds."""

    def __init__(self, provisioner: FakeProvisioner, interval_s: float = 0.01) -> None:
        self.records: list[SliceRecord] = []
        self.now_s = 0.0
        self.busy: set[str] = set()
        self.asked: list[str] = []
        self.provisioner = provisioner
        self.reconciler = Reconciler(
            self._read,
            provisioner,
            RULES,
            fence=self._fence,
            interval_s=interval_s,
            clock=lambda: self.now_s,
        )

    async def _read(self) -> list[SliceRecord]:
        return self.records

    async def _fence(self, each: ObservedSlice) -> str | None:
        self.asked.append(each.name)
        return "host 0 is in use" if each.name in self.busy else None


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - what is awaited is somebody else's state
            await asyncio.sleep(0.005)


async def stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_loop_goes_on_after_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    provisioner = FakeProvisioner(group())
    provisioner.failures = [UnreachableError("the API server is down"), RuntimeError("a fault")]
    rig = Rig(provisioner)
    rig.records = [waiting()]
    task = asyncio.create_task(rig.reconciler.run())
    await until(lambda: provisioner.groups[0].replicas == 1)
    await stop(task)
    assert "the API server is down" in caplog.text
    assert "a fault" in caplog.text


async def test_failure_of_the_directory_plans_nothing() -> None:
    async def read() -> list[SliceRecord]:
        raise RecordsUnavailableError("no directory")

    provisioner = FakeProvisioner(group("s-0"))
    reconciler = Reconciler(read, provisioner, RULES, fence=no_fence, interval_s=1.0)
    with pytest.raises(RecordsUnavailableError):
        await reconciler.tick()
    assert provisioner.num_looks == 0


@pytest.mark.parametrize(
    ("failures", "delay_s"),
    [
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
    rig.records = [holding("s-0")]
    for rig.now_s in (0.0, 60.0, 120.0):
        await rig.reconciler.tick()
    assert rig.asked == []


async def test_cancelled_loop_finishes_the_change_that_it_has_begun() -> None:
    provisioner = FakeProvisioner(group())
    provisioner.gate.clear()
    rig = Rig(provisioner)
    rig.records = [waiting()]
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


async def test_log_has_one_line_per_change_with_its_arithmetic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(FakeProvisioner(group(max_replicas=2)))
    rig.records = [waiting(), waiting(), waiting()]
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
