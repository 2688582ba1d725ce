"""Runs the loop: observe, plan, fence, act; whenever something has happened.

A round follows a change of the cluster, a new report of the directory, an instant at which a delay
of the rules is over, and a slow tick. The cluster reports by itself; the directory's report is
looked at all the time, and the directory is told of the pods.

Owns when that happens, what is logged, and what follows a failure. Decides nothing: that is `plan`.
Catches and logs any exception, because a provisioner that ends provisions nothing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from autoscaling.provisioning.errors import ProvisioningError, RecordsUnavailableError
from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.observer import RoundObserver, Unobserved
from autoscaling.provisioning.plan import (
    PENDING_IDLE_S,
    Change,
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
    plan_slices,
)
from autoscaling.provisioning.protocol import ClusterObservation, Provisioner
from serving.domain.supply.pods import GroupPods, ObservedSlice
from serving.domain.supply.records import SupplyReport

logger = logging.getLogger(__name__)

# A failing API server or directory is asked less and less often, but at least this often.
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
# A directory that has not reported yet is looked for in Ray's head, which costs one small read. The
# first slice of an installation waits for it.
MAX_RECORDS_BACKOFF_S = 4.0
# How often there is a look at cluster and directory between two rounds. Most find nothing new.
LOOK_INTERVAL_S = 1.0
# A cluster reports every host of a slice by itself. What comes within this time is one round.
GATHER_S = 0.5

ReadSupply = Callable[[], Awaitable[SupplyReport]]
# Tells the directory which pods there are. It is called in every round, and must be cheap where
# nothing has changed.
ReportPods = Callable[[tuple[GroupPods, ...]], Awaitable[None]]
# Called right before a slice is dropped. Returns why the slice has to be kept, or `None` if it is
# free and can no longer be taken.
AskFence = Callable[[ObservedSlice], Awaitable[str | None]]
_T = TypeVar("_T")


class Reconciler:
    """Keeps the slices that exist at what replicas ask for. Used from one event loop.

    All it knows from one round to the next is the plan's memory. `interval_s` is the longest time
    between two rounds, `look_interval_s` that between two looks at the directory. `changed` is set
    whenever the cluster is no longer as it was observed; `None` if nobody reports that. `observer`
    is told of every round; `None` if nobody is. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        read_supply: ReadSupply,
        provisioner: Provisioner,
        rules: ProvisioningRules,
        *,
        fence: AskFence,
        report_pods: ReportPods,
        interval_s: float,
        look_interval_s: float = LOOK_INTERVAL_S,
        changed: asyncio.Event | None = None,
        observer: RoundObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_supply = read_supply
        self._report_pods = report_pods
        self._provisioner = provisioner
        self._rules = rules
        self._fence = fence
        self._interval_s = interval_s
        self._look_interval_s = look_interval_s
        self._changed = changed or asyncio.Event()
        self._observer: RoundObserver = observer or Unobserved()
        self._clock = clock
        self._memory = PlannerState()
        self._reported: frozenset[str] = frozenset()
        self._num_failures = 0
        # What the last round went by; `None` if it could not be read.
        self._seen: tuple[ClusterObservation, SupplyReport] | None = None

    async def run(self) -> None:
        """Runs rounds until it is cancelled; a change that has begun is made first."""
        while True:
            delay_s = await self.attempt()
            if not self._num_failures:
                await self._until_due(delay_s)
            elif self._seen is None:
                await asyncio.sleep(delay_s)
            else:
                await self._sit_out(delay_s)

    async def tick(self) -> ProvisioningPlan:
        """Runs one round and returns the plan as it was carried out.

        Raises:
            ProvisioningError: something could not be read or done. What was planned is planned
                again from what the next round observes.
        """
        # Before the look: what happens during it starts another round.
        self._changed.clear()
        self._seen = None
        behind = await self._catch_up()
        self._seen = observed, report = await self._look()
        plan = plan_slices(report, observed.groups, self._rules, self._clock(), self._memory)
        # Before the attempt: what fails is not tried again at once either.
        self._memory = plan.state
        return await _to_its_end(self._carry_out(plan, (*observed.notes, *behind)))

    async def attempt(self) -> float:
        """Runs one round, survives its failures, and returns the most seconds until the next."""
        try:
            self._observer.done(await self.tick())
        except ProvisioningError as error:
            self._observer.failed(error)
            is_of_records = isinstance(error, RecordsUnavailableError)
            most_s = MAX_RECORDS_BACKOFF_S if is_of_records else MAX_BACKOFF_S
            delay_s = self._backoff_s(error.retry_after_s, most_s)
            logger.warning("provisioning_failed next_in_s=%.1f error=%r", delay_s, str(error))
            return delay_s
        except Exception as error:
            self._observer.failed(error)
            delay_s = self._backoff_s(None)
            logger.exception("provisioning_failed next_in_s=%.1f", delay_s)
            return delay_s
        self._num_failures = 0
        return due_in_s(self._memory, self._rules, self._clock(), self._interval_s)

    async def _catch_up(self) -> tuple[str, ...]:
        """Has what was applied take effect; what fails is told, and holds up no slice."""
        try:
            await self._provisioner.catch_up()
        except ProvisioningError as error:
            return (f"what was applied does not take effect: {error}",)
        return ()

    async def _look(self) -> tuple[ClusterObservation, SupplyReport]:
        """Shows what there is. The directory is told of the pods before it is asked."""
        observed = await self._provisioner.observe()
        self._observer.observed(observed)
        replacing = self._memory.replacing
        await self._report_pods(tuple(pods_of(group, replacing) for group in observed.groups))
        report = await self._read_supply()
        self._observer.reported(report)
        return observed, report

    async def _until_due(self, delay_s: float) -> None:
        """Waits for `delay_s`, a new report or a changed cluster, whatever is first."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        while (left_s := due_s - loop.time()) > 0:
            # A look that has begun is ended: half a report would mislead the directory.
            if await self._is_changed(min(left_s, self._look_interval_s)) or await self._has_news():
                return

    async def _sit_out(self, delay_s: float) -> None:
        """Waits for `delay_s` whatever happens, since a change failed that would be made again.

        The directory still learns of the pods, and that we live.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        while (left_s := due_s - loop.time()) > 0:
            await asyncio.sleep(min(left_s, self._look_interval_s))
            await self._has_news()

    async def _is_changed(self, within_s: float) -> bool:
        """Returns whether the cluster reports a change within this time."""
        try:
            # Not `wait_for`, which loses a cancellation that comes together with the change.
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(GATHER_S)
        return True

    async def _has_news(self) -> bool:
        try:
            return await self._look() != self._seen
        except Exception:  # noqa: BLE001 - the round looks again, and reports it
            return True

    async def _carry_out(self, plan: ProvisioningPlan, notes: Iterable[str]) -> ProvisioningPlan:
        """Makes change by change, and returns the plan without the slices that were kept.

        The slices that a change drops are fenced right before it. So no group waits for the hosts
        of another, and a failure leaves no more fenced slices behind than those of one group.
        """
        kept: dict[str, str] = {}
        failures = []
        for change in plan.changes:
            reasons = await self._kept(change)
            kept |= reasons
            left = change.keeping(reasons)
            if left is not None:
                _log_change(left)
                try:
                    await self._provisioner.apply(ProvisioningPlan((left,)))
                    self._observer.changed(left)
                except ProvisioningError as error:
                    failures.append(error)
        plan = plan.keeping(kept)
        self._memory = plan.state
        self._log_refusals(plan, notes)
        if failures:
            raise failures[0]
        return plan

    async def _kept(self, change: Change) -> dict[str, str]:
        """The slices that must not be dropped after all, by incarnation, with the reason."""
        kept = {}
        for drop in change.drops:
            reason = await self._fence(drop.slice)
            if reason is not None:
                kept[drop.slice.incarnation] = reason
        return kept

    def _backoff_s(self, retry_after_s: float | None, most_s: float = MAX_BACKOFF_S) -> float:
        self._num_failures += 1
        backoff_s: float = min(most_s, FIRST_BACKOFF_S * 2 ** min(self._num_failures, 10))
        return max(backoff_s, retry_after_s or 0.0)

    def _log_refusals(self, plan: ProvisioningPlan, notes: Iterable[str]) -> None:
        refused = {f"{refusal.about}: {refusal.reason}" for refusal in plan.refusals}
        reported = frozenset(refused | set(notes))
        # What stays refused is reported once, not every round.
        for text in sorted(reported - self._reported):
            logger.warning("slices_refused reason=%r", text)
        self._reported = reported


def pods_of(
    group: WorkerGroup, leave_reasons: Mapping[str, str] = MappingProxyType({})
) -> GroupPods:
    """Returns what the directory has to know of a group.

    `leave_reasons` say of slices, by incarnation, why their replicas are to leave them.
    """
    return GroupPods(
        group=group.name,
        compute_class=group.kind.compute_class,
        generation=group.kind.generation,
        topology=group.kind.topology,
        zone=group.zone,
        num_hosts=group.num_hosts,
        slices=tuple(
            replace(each, leave_reason=leave_reasons.get(each.incarnation))
            if each.incarnation in leave_reasons
            else each
            for each in group.slices
        ),
    )


def due_in_s(
    memory: PlannerState, rules: ProvisioningRules, now_s: float, interval_s: float
) -> float:
    """Returns the seconds until a delay of the rules is over, at most `interval_s`.

    A round at that instant does what the plan had to put off.
    """
    ends_s = [at_s + rules.min_change_interval_s for at_s in memory.changed_at_s.values()]
    for idle_s in (rules.idle_s, PENDING_IDLE_S):
        ends_s += [since_s + idle_s for since_s in memory.unwanted_since_s.values()]
    return min([interval_s, *(end_s - now_s for end_s in ends_s if end_s > now_s)])


def _log_change(change: Change) -> None:
    drops = ", ".join(f"{drop.slice.name} ({drop.reason})" for drop in change.drops)
    logger.info(
        "slices_changed group=%s from=%d to=%d drop=%r reason=%r",
        change.group.name,
        change.group.replicas,
        change.replicas,
        drops,
        change.reason,
    )


async def _to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Does `work`, also when cancelled: a fenced slice that is not dropped would be replaced."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
