"""Moves compiled programs to and from every host of an engine's slices.

Owns the place and the time: all hosts pull at once before the engine starts. They push after its
warm-up and when it drains. Each host has a folder of its own, so each host pulls. JAX writes
programs on the first host of a joint computation only. With a pipeline stage on each host all
hosts write programs, so all hosts push.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray

from serving.artifacts.compile_cache.report import Damage, PullReport, PushReport, TransferOutcome
from serving.engine.spec import Programs
from serving.engine.tpu.compile_cache import pull_here, push_here
from serving.link.messages import ProgramsMoved
from serving.slices.reservation import Reservation

logger = logging.getLogger(__name__)

# Beyond the budget that each host keeps by itself: for its process to start, and for a store that
# holds a call up in the kernel (a mount that hangs).
_MARGIN_S = 20.0


class CompileCacheSync:
    """The sync of one engine, owned by its session. No failure of it stops an engine's start."""

    def __init__(
        self,
        programs: Programs,
        reservation: Reservation,
        environment: Mapping[str, str],
        life_id: str,
    ) -> None:
        """Takes the `environment` of its tasks, which may hold what the store's client reads."""
        self.moved = ProgramsMoved()
        self._programs = programs
        self._environment = dict(environment)
        self._life_id = life_id
        self._damage: dict[tuple[int, int], tuple[Damage, ...]] = {}
        self._hosts = [
            (part, host.worker_id, reservation.on_host(host.worker_id, part))
            for part, whole in enumerate(reservation.slices)
            for host in whole.hosts
        ]

    async def pull(self) -> str:
        """Pulls to all hosts; returns a summary for a reader."""
        reports = await self._on_all_hosts(pull_here, lambda _: ())
        for place, report in reports.items():
            assert isinstance(report, PullReport)
            self._damage[place] = report.damage
            self.moved.pulled += report.num_fetched
            self.moved.pulled_bytes += report.num_bytes
            self.moved.pull_s += report.duration_s
            self.moved.damaged += len(report.damage) + report.num_dropped
            self.moved.failures += _has_failed(report)
        fetched = sum(each.num_fetched for each in reports.values() if isinstance(each, PullReport))
        return f"{fetched} compiled programs came to {len(reports)} of {len(self._hosts)} hosts"

    async def push(self) -> None:
        """Pushes what the hosts have compiled and the store lacks."""
        reports = await self._on_all_hosts(push_here, lambda place: (self._damage.get(place, ()),))
        for place, report in reports.items():
            assert isinstance(report, PushReport)
            if report.outcome == TransferOutcome.DONE:
                self._damage.pop(place, None)
            self.moved.pushed += report.num_pushed
            self.moved.pushed_bytes += report.num_bytes
            self.moved.push_s += report.duration_s
            self.moved.rebuilt += report.num_rebuilt
            self.moved.failures += _has_failed(report)

    async def _on_all_hosts(
        self,
        task: Callable[..., PullReport | PushReport],
        arguments: Callable[[tuple[int, int]], tuple[Any, ...]],
    ) -> dict[tuple[int, int], PullReport | PushReport]:
        """Returns the reports by slice and host; a host that did not answer has none."""
        limit_s = self._programs.cache.budget_s + _MARGIN_S
        runs: dict[tuple[int, int], Any] = {}
        for part, worker_id, strategy in self._hosts:
            options = {
                "num_cpus": 0,
                "max_retries": 0,
                "scheduling_strategy": strategy,
                "runtime_env": {"env_vars": self._environment},
            }
            log = {"life": self._life_id, "part": part, "host": worker_id}
            place = (part, worker_id)
            runs[place] = (
                ray.remote(task).options(**options).remote(self._programs, *arguments(place), log)
            )
        answers = await asyncio.gather(
            *(self._answer(task.__name__, place, run, limit_s) for place, run in runs.items())
        )
        found = zip(runs, answers, strict=True)
        return {place: report for place, report in found if report is not None}

    async def _answer(
        self, what: str, place: tuple[int, int], run: Any, limit_s: float
    ) -> PullReport | PushReport | None:
        try:
            async with asyncio.timeout(limit_s):
                report: PullReport | PushReport = await run
        except (TimeoutError, ray.exceptions.RayError) as error:
            ray.cancel(run, force=True)
            self.moved.failures += 1
            logger.warning(
                "programs_not_moved life=%s task=%s part=%d host=%d error=%r",
                self._life_id, what, *place, str(error),
            )  # fmt: skip
            return None
        return report


def _has_failed(report: PullReport | PushReport) -> bool:
    return report.outcome in (TransferOutcome.UNREACHABLE, TransferOutcome.OUT_OF_TIME)
