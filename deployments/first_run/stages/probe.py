"""Stage `probe`: the slice's own probe, three times in a row, before an engine has the chips."""

import json
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.first_run.context import StageContext
from deployments.first_run.hosts.reach import PYTHON, HostAnswer, hosts_of
from deployments.first_run.order import RunStage
from deployments.first_run.results import Measurement, StageResult, judged
from deployments.first_run.stages.served_models import RunModel, run_model
from serving.slices.probe import Platform, ProbeSpec

_PROBE = (PYTHON, "-m", "deployments.first_run.hosts.probe_here")
_NUM_PROBES = 3
# Above JAX's own for this; another one each time, because one that was used is not free at once.
_FIRST_PORT = 8476
# Chips that one process has left are free for the next within it: an expectation of 2026-11-22, for
# the hand-over was never measured.
_HAND_OVER_S = 10.0


@dataclass(frozen=True, slots=True)
class ProbeTurn:
    """One probe: what the host told, and the seconds that its program took."""

    number: int
    answer: HostAnswer
    wall_s: float


def probe(context: StageContext) -> StageResult:
    """Probes three times, on all hosts of a slice together."""
    model = run_model(context)
    hosts = hosts_of(context.address)
    spec = _spec(model)
    program = (
        PYTHON,
        "-m",
        "deployments.first_run.hosts.probe_here",
        msgspec.json.encode(spec).decode(),
    )
    turns = []
    for number in range(1, _NUM_PROBES + 1):
        limit_s = context.left_s / (_NUM_PROBES + 1 - number)
        began_s = time.monotonic()
        port = f"{_FIRST_PORT + number}"
        answers = hosts.run((*program, f"{0.9 * limit_s:.1f}", port), limit_s)
        wall_s = time.monotonic() - began_s
        turns += [ProbeTurn(number, answer, wall_s) for answer in answers]
        context.keep("probes.json", json.dumps([_told(turn) for turn in turns], indent=1))
    first = {turn.answer.host: turn for turn in reversed(turns)}
    longer_s = _HAND_OVER_S * context.patience
    measured = [
        each for turn in turns for each in measured_turn(turn, first[turn.answer.host], longer_s)
    ]
    return judged(RunStage.PROBE, measured)


def _spec(model: RunModel) -> ProbeSpec:
    if model.slice is None:
        return ProbeSpec(platform=Platform.CPU, num_hosts=1, process_id=0, devices_per_host=1)
    shape = model.slice.shape
    return ProbeSpec(
        platform=Platform.TPU,
        num_hosts=shape.num_hosts,
        process_id=0,
        devices_per_host=shape.chips_per_host * shape.devices_per_chip,
        hbm_bytes_per_device=shape.hbm_bytes_per_device,
    )


def _told(turn: ProbeTurn) -> dict[str, Any]:
    return {
        "number": turn.number,
        "host": turn.answer.host,
        "wall_s": round(turn.wall_s, 3),
        "probe": turn.answer.last_json(),
        "errors": turn.answer.errors[-4000:],
    }


def measured_turn(turn: ProbeTurn, first: ProbeTurn, longer_s: float) -> list[Measurement]:
    """Judges one probe, which may take `longer_s` seconds more than the first. Pure."""
    told = turn.answer.last_json() or {}
    what = f"probe {turn.number} on {turn.answer.host}"
    outcome = told.get("outcome")
    words = f"{outcome} in {turn.wall_s:.1f} s" if outcome else turn.answer.complaint()
    if outcome and outcome != "passed":
        words = f"{words}: {told.get('reason')}"
    found = [Measurement(what, "passed", words, is_met=outcome == "passed")]
    if turn is not first:
        later_s = turn.wall_s - first.wall_s
        found.append(
            Measurement(
                f"{what}, longer than the first",
                f"below {longer_s:g} s",
                f"{later_s:.1f} s",
                is_met=later_s < longer_s,
            )
        )
    return found
