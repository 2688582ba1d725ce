"""Runs the loop: observe, plan, fence, act; again and again.

Owns when that happens, what is logged, and what follows a failure. Decides nothing: that is `plan`.
Catches and logs any exception, because a provisioner that ends provisions nothing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from autoscaling.provisioning.demand import demand_by_kind
from autoscaling.provisioning.errors import ProvisioningError
from autoscaling.provisioning.groups import ObservedSlice
from autoscaling.provisioning.plan import (
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
    plan_slices,
)
from autoscaling.provisioning.protocol import Provisioner
from serving.domain.slice_records import SliceRecord

logger = logging.getLogger(__name__)

# A failing API server or directory is asked less and less often, but at least this often.
MAX_BACKOFF_S = 60.0

ReadRecords = Callable[[], Awaitable[Iterable[SliceRecord]]]
# Called right before a slice is dropped. Returns why the slice has to be kept, or `None` if it is
# free and can no longer be taken.
AskFence = Callable[[ObservedSlice], Awaitable[str | None]]
_T = TypeVar("_T")


class Reconciler:
    """Keeps the slices that exist at what replicas ask for. Used from one event loop.

    All it knows from one round to the next is the plan's memory. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        read_records: ReadRecords,
        provisioner: Provisioner,
        rules: ProvisioningRules,
        *,
        fence: AskFence,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_records = read_records
        self._provisioner = provisioner
        self._rules = rules
        self._fence = fence
        self._interval_s = interval_s
        self._clock = clock
        self._memory = PlannerState()
        self._reported: frozenset[str] = frozenset()
        self._num_failures = 0

    async def run(self) -> None:
        """Runs rounds until it is cancelled; a change that has begun is made first."""
        while True:
            delay_s = await self.attempt()
            await asyncio.sleep(delay_s)

    async def tick(self) -> ProvisioningPlan:
        """Runs one round and returns the plan as it was carried out.

        Raises:
            ProvisioningError: something could not be read or done. What was planned is planned
                again from what the next round observes.
        """
        records = await self._read_records()
        observed = await self._provisioner.observe()
        demands = demand_by_kind(records)
        plan = plan_slices(demands, observed.groups, self._rules, self._clock(), self._memory)
        # Before the attempt: what fails is not tried again at once either.
        self._memory = plan.state
        return await _to_its_end(self._carry_out(plan, observed.notes))

    async def attempt(self) -> float:
        """Runs one round, survives its failures, and returns the seconds until the next round."""
        try:
            await self.tick()
        except ProvisioningError as error:
            delay_s = self._backoff_s(error.retry_after_s)
            logger.warning("provisioning_failed next_in_s=%.1f error=%r", delay_s, str(error))
            return delay_s
        except Exception:
            delay_s = self._backoff_s(None)
            logger.exception("provisioning_failed next_in_s=%.1f", delay_s)
            return delay_s
        self._num_failures = 0
        return self._interval_s

    async def _carry_out(self, plan: ProvisioningPlan, notes: Iterable[str]) -> ProvisioningPlan:
        """Fences the slices to drop, applies the plan, and returns it without what was kept."""
        plan = plan.keeping(await self._kept(plan))
        self._memory = plan.state
        self._log_changes(plan, notes)
        if plan.changes:
            await self._provisioner.apply(plan)
        return plan

    async def _kept(self, plan: ProvisioningPlan) -> dict[str, str]:
        """The slices that must not be dropped after all, by incarnation, with the reason."""
        kept = {}
        for change in plan.changes:
            for drop in change.drops:
                reason = await self._fence(drop.slice)
                if reason is not None:
                    kept[drop.slice.incarnation] = reason
        return kept

    def _backoff_s(self, retry_after_s: float | None) -> float:
        self._num_failures += 1
        backoff_s: float = min(MAX_BACKOFF_S, self._interval_s * 2 ** min(self._num_failures, 10))
        return max(backoff_s, retry_after_s or 0.0)

    def _log_changes(self, plan: ProvisioningPlan, notes: Iterable[str]) -> None:
        for change in plan.changes:
            drops = ", ".join(f"{drop.slice.name} ({drop.reason})" for drop in change.drops)
            logger.info(
                "slices_changed group=%s from=%d to=%d drop=%r reason=%r",
                change.group.name,
                change.group.replicas,
                change.replicas,
                drops,
                change.reason,
            )
        refused = {f"{refusal.about}: {refusal.reason}" for refusal in plan.refusals}
        reported = frozenset(refused | set(notes))
        # What stays refused is reported once, not every round.
        for text in sorted(reported - self._reported):
            logger.warning("slices_refused reason=%r", text)
        self._reported = reported


async def _to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Does `work`, also when cancelled: a fenced slice that is not dropped would be replaced."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
