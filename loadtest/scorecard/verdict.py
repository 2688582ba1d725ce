"""Judges a run: one exit code and one sentence. Pure.

Judged in this order: a client that may not be believed, then failures, then objectives. An invalid
run shows nothing about objectives, and a broken one is not merely slow.
"""

from dataclasses import dataclass

from loadtest.errors import ExitCode
from loadtest.scorecard.client_gates import ClientReport
from loadtest.scorecard.counts import Correctness, RequestCounts
from loadtest.scorecard.formats import counted
from loadtest.scorecard.slo import Objective, ServiceLevel


@dataclass(frozen=True, slots=True)
class Verdict:
    """The `exit_code` and its name, and the sentence that explains it."""

    exit_code: int
    name: str
    sentence: str


def reach_verdict(
    client: ClientReport,
    requests: RequestCounts,
    correctness: Correctness,
    level: ServiceLevel,
    objectives: tuple[Objective, ...],
) -> Verdict:
    """The verdict. What `level` allows of failed requests and lost tokens is not held against it.

    Repeated and foreign tokens are never allowed.
    """
    if not client.valid:
        sentence = f"the numbers describe the client: {'; '.join(client.reasons)}"
        return _verdict(ExitCode.CLIENT_INVALID, sentence)
    if faults := _faults(requests, correctness, level):
        return _verdict(ExitCode.FAILED, "; ".join(faults))
    missed = [objective.name for objective in objectives if not objective.ok]
    if missed:
        sentence = f"{len(missed)} of {counted(len(objectives), 'objective')} missed"
        return _verdict(ExitCode.OBJECTIVE_MISSED, f"{sentence}: {', '.join(missed)}")
    met = (
        f"all {counted(len(objectives), 'objective')} met" if objectives else "no objectives given"
    )
    failed = f"{requests.failed:,} of {counted(requests.total, 'request')} failed"
    return _verdict(ExitCode.OK, f"{failed}, {met}")


def _faults(requests: RequestCounts, correctness: Correctness, level: ServiceLevel) -> list[str]:
    faults: list[str] = []
    if not requests.ok:
        faults.append("no request succeeded")
    elif requests.failed > (level.error_ratio or 0.0) * requests.total:
        faults.append(f"{requests.failed:,} of {counted(requests.total, 'request')} failed")
    lost = correctness.lost_tokens or 0
    if lost > (level.max_lost_tokens or 0):
        faults.append(f"{counted(lost, 'token')} lost")
    if correctness.repeated_tokens:
        faults.append(f"{counted(correctness.repeated_tokens, 'token')} repeated")
    if correctness.foreign_tokens:
        faults.append(f"{counted(correctness.foreign_tokens, 'foreign token')}")
    return faults


def _verdict(code: ExitCode, sentence: str) -> Verdict:
    return Verdict(code.value, code.name.lower(), sentence)
