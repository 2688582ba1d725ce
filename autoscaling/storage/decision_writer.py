"""Writes what the policy decided and learned, off the controller's loop: log, report and memory.

Everything is written in one thread, in order. What cannot be written is reported once and shown as
an alert; the decisions go on. Reads nothing.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy.quotas.records import ChipShare
from autoscaling.policy.rules import Rules
from autoscaling.records import Observation, Plan
from autoscaling.replay import DecisionLog
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.plan_report import PlanReport

logger = logging.getLogger("ray.serve.slicewise")

# Writes that may wait. A disk that hangs for as long loses decisions, and the log reports it.
_MAX_WAITING = 1000


class DecisionWriter:
    """Implements `DecisionSink`. `executor` has one thread.

    `write_plan_report` stores a report, `write_memory` what one model's policy has learned.
    """

    def __init__(
        self,
        executor: Executor,
        write_plan_report: Callable[[PlanReport], None],
        write_memory: Callable[[str, PolicyRecord], None],
    ) -> None:
        self._executor = executor
        self._write_report = write_plan_report
        self._write_memory = write_memory
        self._log: DecisionLog | None = None
        self._room = threading.BoundedSemaphore(_MAX_WAITING)
        self._problems: dict[str, str] = {}  # by what could not be written

    @property
    def alerts(self) -> tuple[str, ...]:
        """Returns what could not be written at the last attempt."""
        return tuple(f"{what} cannot be written: {why}" for what, why in self._problems.items())

    def open_log(self, path: Path | None) -> None:
        """Writes decisions to `path` from now on; `None`: to no file."""
        if path is not None:
            self._do(f"the decision log {path}", self._open, path)

    def begin(
        self,
        model: str,
        profile: CapacityProfile,
        terms: tuple[ComputeClass, ...],
        rules: Rules,
        memory: PolicyRecord | None,
        profiles: Mapping[str, CapacityProfile],
    ) -> None:
        """Logs the beginning; see `DecisionSink`."""
        entry = (model, profile, terms, rules, memory, profiles)
        self._do("the decision log", self._logged, "begin", *entry)

    def decided(self, model: str, observation: Observation, share: ChipShare, plan: Plan) -> None:
        """Logs the decision; see `DecisionSink`."""
        self._do("the decision log", self._logged, "decided", model, observation, share, plan)

    def publish(self, board: PlanReport) -> None:
        """Stores the plan report."""
        self._do("the plan report", self._write_report, board)

    def remember(self, model: str, record: PolicyRecord) -> None:
        """Stores what a policy of this model has learned."""
        self._do(f"the memory of {model}", self._write_memory, model, record)

    def close(self) -> None:
        """Has what waits written, then closes the log. Does not wait for it."""
        self._executor.submit(self._close)
        self._executor.shutdown(wait=False)

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _open(self, path: Path) -> None:
        self._log = DecisionLog(path)

    def _logged(self, kind: str, *entry: Any) -> None:
        if self._log is None:
            return
        if kind == "begin":
            self._log.begin(*entry)
        else:
            self._log.decided(*entry)

    def _do(self, what: str, write: Callable[..., None], *arguments: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._problems[what] = f"{_MAX_WAITING} writes wait already"
            return
        self._executor.submit(self._try, what, write, *arguments)

    def _try(self, what: str, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except Exception as error:  # noqa: BLE001 - a plan that is not written is still a plan
            if what not in self._problems:
                logger.warning("plan_not_written what=%r error=%r", what, error)
            self._problems[what] = repr(error)
        else:
            self._problems.pop(what, None)
        finally:
            self._room.release()
