"""The live side of the calibration: the application under load, and what it leaves behind.

Owns the starting of the platform, the sending, and the reading of records and decision log. All
instants count from the start of the load. Does not own the simulation (`calibration`).
"""

import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import yaml

from autoscaling.policy_config import read_policy_settings
from autoscaling.records import Observation, Plan
from autoscaling.replay import observation_of_json, plan_of_json
from autoscaling.simulator.world.arrivals import Requests
from benchmarks.servers import MODEL
from loadtest.client.check_kind import CheckKind
from loadtest.client.prompt_source import PromptFile, find_prompts
from loadtest.planned_request import Api
from loadtest.run.plan import PLAN_FILE, PROMPTS_FILE, RunPlan
from loadtest.run.supervisor import RunParts, run_load
from loadtest.scorecard.stored_run import StoredRun, read_run
from loadtest.workload.arrival_laws import ReplayArrivals
from loadtest.workload.spec import WorkloadSpec
from serving.domain.capacity.slice_profile import CapacityProfile
from tests.e2e.application import PROJECT_ROOT, RunningApplication

SEED = 20
# As slow as a slice that serves a large model; few tokens, so that two cores carry several slices.
PACE = {
    "ttft_ms": 20,
    "tpot_ms": 30,
    "tpot_per_seq_ms": 6,
    "prefill_tokens_per_s": 2500,
    "max_num_seqs": 32,
}
LAW = CapacityProfile(
    model=MODEL,
    engine="paced",
    generation="v6e",
    topology="2x2",
    base_s=0.03,
    per_sequence_s=0.006,
    per_prompt_token_s=1 / 2500,
    max_num_seqs=32,
    ttft_floor_s=0.02,
    load_s=5.0,
    measured_on="2026-11-21",
    source="the pace of the paced engine, an input and no measurement",
)
TTFT_OBJECTIVE_S, TPOT_OBJECTIVE_S = 3.0, 0.1
DEADLINE_S = 120.0
_DRAIN_S = 30.0
_AT_ZERO_S = 180.0
# Before the load nothing is there; this much of it is simulated, too.
_LEAD_IN_S = 15.0


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of each request, in order of `sent_s`; NaN where there is no such time."""

    sent_s: npt.NDArray[np.float64]
    ttft_s: npt.NDArray[np.float64]
    tpot_s: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """One decision as either side logs it."""

    observation: Observation
    plan: Plan


class ScalingApplication(RunningApplication):
    """The shipped scaling application with the law, objectives and classes of this module."""

    def __init__(self) -> None:
        shipped = PROJECT_ROOT / "deployments" / "sim"
        self._file = yaml.safe_load((shipped / "autoscaling.yaml").read_text())
        (application,) = self._file["applications"]
        self._kwargs = application["autoscaling_policy"]["policy_kwargs"]
        (model,) = application["args"]["models"]
        rules = self._kwargs["models"].pop(model["name"])
        model |= {"name": MODEL, "paced": PACE}
        for deployment in model["deployments"]:
            deployment["replicas"] = 0
            rules["classes"][deployment["compute_class"]]["max_slices"] = deployment["max_replicas"]
        # Replicas start more slowly on two busy cores than the shipped file allows for.
        rules["classes"]["spot"] |= {"provisioning_s": 10.0, "patience_s": 20.0}
        rules["rules"]["drain_delay_s"] = 30.0
        rules["profile"] = LAW.model_dump()
        # The model's too, since simulated gateways hold them while engines lack.
        model["objectives"] = {"ttft_s": TTFT_OBJECTIVE_S, "tpot_s": TPOT_OBJECTIVE_S}
        rules["objectives"] = dict(model["objectives"])
        rules["assumed_tokens"] = {"input": 120, "output": 20}
        self._kwargs["models"] = {MODEL: rules}
        application["args"]["gateway"] = {"request_deadline_s": DEADLINE_S}
        (self.settings,) = read_policy_settings(self._kwargs).models
        plan = yaml.safe_load((shipped / "autoscaling_cluster.yaml").read_text())
        super().__init__(application["args"], through="sim", plan=plan)
        self.decision_log = self.folder / "decisions.jsonl"

    def write_config(self, args: Mapping[str, Any]) -> Path:
        """The file with the policy's settings and its log."""
        (application,) = self._file["applications"]
        application["args"] = dict(args)
        self._kwargs["decision_log"] = str(self.decision_log)
        self._file["http_options"]["port"] = self.port
        self.config_path.write_text(yaml.safe_dump(self._file))
        return self.config_path

    def wait_empty(self) -> None:
        """Waits until the policy knows the load and wants no slice, and there is none."""
        self.wait_fleet(_is_at_zero, _AT_ZERO_S)

    def _is_ready(self) -> bool:
        # How many engines there are is the policy's business from the start.
        return "Try it:" in self.log_text()


def _is_at_zero(fleet: Mapping[str, Any]) -> bool:
    models = (fleet["autoscaling"] or {"models": []})["models"]
    if not models or models[0]["alerts"]:
        return False
    targets = models[0]["targets"]
    return not fleet["slices"] and bool(targets) and not any(targets.values())


def send(url: str, planned: Requests) -> StoredRun:
    """Sends `planned`, open loop, and reads the records of it."""
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        out = Path(folder)
        trace = out / "trace.jsonl"
        rows = zip(
            (planned.arrival_s - planned.arrival_s[0]).tolist(),
            planned.input_tokens.tolist(),
            planned.output_tokens.tolist(),
            strict=True,
        )
        keys = ("offset_s", "input_tokens", "output_tokens")
        trace.write_text(
            "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)
        )
        plan = RunPlan.of(
            url=url,
            workload=WorkloadSpec(arrivals=ReplayArrivals(trace=trace), api=Api.COMPLETIONS),
            models=(MODEL,),
            duration_s=float(planned.arrival_s[-1] - planned.arrival_s[0]) + 1.0,
            drain_s=_DRAIN_S,
            seed=SEED,
            # Checked by their ids: half of the demo model's tokens are no whole character, and
            # without ids a client would see its first token only when a character is whole.
            check=CheckKind.PACED,
        )
        offsets_s = (planned.arrival_s - planned.arrival_s[0]).tolist()
        return run_plan(plan, find_prompts(url, [MODEL], None), offsets_s, out)


def run_plan(
    plan: RunPlan, prompts: PromptFile, offsets_s: Sequence[float], folder: Path
) -> StoredRun:
    """Sends what is planned, with its records in an empty folder, and reads them."""
    plan.write(folder / PLAN_FILE)
    (folder / PROMPTS_FILE).write_text(prompts.model_dump_json())
    run_load(plan, RunParts(folder, None, offsets_s, None, lambda _: None))
    return read_run(folder)


def answered_of(stored: StoredRun) -> tuple[Requests, Answered]:
    """What was sent, and how it fared.

    Raises:
        RuntimeError: a request failed; a run with failures calibrates nothing.
    """
    records = sorted(stored.requests, key=lambda each: each.sent_s)
    failed = [f"{each.error}: {each.detail}" for each in records if not each.is_ok]
    if failed or stored.num_missing:
        raise RuntimeError(f"{len(failed)} failed, {stored.num_missing} not sent: {failed[:3]}")
    sent = Requests.of_rows(
        (each.sent_s, each.input_tokens or 0, each.output_tokens or 0) for each in records
    )
    first_s = np.array([each.first_s for each in records], np.float64)
    last_s = np.array([each.last_s for each in records], np.float64)
    per_token_s = (last_s - first_s) / (sent.output_tokens - 1)
    return sent, Answered(sent.arrival_s, first_s - sent.arrival_s, per_token_s)


def logged_steps(path: Path, start_unix_s: float) -> tuple[Step, ...]:
    """The decisions of the log from shortly before the load on; before it nothing was there."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    steps = (
        Step(
            shifted_observation(observation_of_json(each["observation"]), -start_unix_s),
            replace(plan_of_json(each["plan"]), at_s=each["plan"]["at_s"] - start_unix_s),
        )
        for each in entries
        if each["kind"] == "decision"
    )
    return tuple(each for each in steps if each.plan.at_s >= -_LEAD_IN_S)


def shifted_observation(seen: Observation, by_s: float) -> Observation:
    """The same observation on a clock that shows `by_s` more."""
    slices = tuple(
        replace(
            each,
            since_s=each.since_s + by_s,
            requested_at_s=each.requested_at_s + by_s,
            expires_at_s=None if each.expires_at_s is None else each.expires_at_s + by_s,
        )
        for each in seen.fleet.slices
    )
    losses = tuple(replace(each, at_s=each.at_s + by_s) for each in seen.fleet.losses)
    return Observation(
        seen.now_s + by_s,
        None if seen.load is None else replace(seen.load, at_s=seen.load.at_s + by_s),
        replace(seen.fleet, slices=slices, losses=losses),
    )


@dataclass(slots=True)
class Neighbours:
    """Cores that neither the platform nor the client used; what has ended counts in, too."""

    cores: float = 0.0


@contextmanager
def watched_neighbours(
    find: Callable[[], Iterable[psutil.Process]],
) -> Iterator[Neighbours]:
    """Tells afterwards what others used; `find` looks up the platform's processes as of now."""
    found = Neighbours()
    ours, machine_s, at_s = _cpu_s(find()), _machine_s(), time.monotonic()
    yield found
    elapsed_s = time.monotonic() - at_s
    used_s = sum(each - ours.get(pid, 0.0) for pid, each in _cpu_s(find()).items())
    found.cores = (_machine_s() - machine_s - used_s) / elapsed_s


def _cpu_s(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """CPU seconds so far by process id; 0 is this process with the children that ended."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    used = {0: sum(each.ru_utime + each.ru_stime for each in own)}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            used[process.pid] = sum(process.cpu_times()[:2])
    return used


def _machine_s() -> float:
    times = psutil.cpu_times()
    idle_s = times.idle + times.iowait + times.guest + times.guest_nice
    return float(sum(times) - idle_s)
