"""Conversations on the application as it is started, sent by the load test."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calibration_live import run_plan, watched_neighbours
from benchmarks.conversations.loads import Load
from benchmarks.conversations.records import Run, Turn
from benchmarks.servers import MODEL, Server
from loadtest.client.check_kind import CheckKind
from loadtest.client.prompt_source import ServerPrompts, find_prompts
from loadtest.planned_request import PlannedRequest
from loadtest.records import RequestRecord
from loadtest.run.plan import RunPlan
from loadtest.workload.build import build_workload

_DRAIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent to a server: the plan, the tokens of its blocks, and what became of each."""

    planned: Sequence[PlannedRequest]
    prompts: ServerPrompts
    records: Sequence[RequestRecord]
    other_cores: float

    def as_run(self, system: str, load: Load, pair: int, seed: int) -> Run:
        """For the record.

        Raises:
            RuntimeError: a request failed.
        """
        turns = tuple(Turn.of(each) for each in self.records)
        return Run(system, load.name, pair, seed, round(self.other_cores, 3), turns)


def send(server: Server, load: Load, seed: int, check: CheckKind) -> Sent:
    """Sends the load's conversations, and waits for all answers.

    Raises:
        RuntimeError: not all of them were sent.
    """
    workload = load.workload
    built = build_workload(workload, models=[MODEL], duration_s=load.duration_s, seed=seed)
    offsets_s = [each.offset_s for each in built.requests if each.offset_s is not None]
    with tempfile.TemporaryDirectory(prefix="conversations-") as folder:
        plan = RunPlan.of(
            url=server.url,
            workload=workload,
            models=(MODEL,),
            duration_s=load.duration_s,
            drain_s=_DRAIN_S,
            seed=seed,
            check=check,
        )
        found = find_prompts(server.url, [MODEL], None)
        with watched_neighbours(server.all_processes) as neighbours:
            stored = run_plan(plan, found, offsets_s, Path(folder))
    if stored.num_missing:
        raise RuntimeError(f"{stored.num_missing} requests were not sent")
    records = sorted(stored.requests, key=lambda each: each.sent_s)
    return Sent(built.requests, ServerPrompts.of(found), records, neighbours.cores)
