"""Stages `doctor` and `hosts`: what the hosts are like, before anything runs and at the end."""

import json
from collections.abc import Mapping
from typing import Any

from deployments.first_run.context import StageContext
from deployments.first_run.hosts.reach import PYTHON, HostAnswer, hosts_of
from deployments.first_run.order import RunStage
from deployments.first_run.results import Measurement, StageResult, judged

# The application takes a free port.
_DOCTOR = (PYTHON, "-m", "deployments.cli", "doctor", "--json", "--gateway-port", "0")
_FACTS = (PYTHON, "-m", "deployments.first_run.hosts.host_facts")
# What has to be the same on every host.
_EQUAL = ("python", "packages")


def doctor(context: StageContext) -> StageResult:
    """Keeps the facts of every host, and judges them by `slicewise doctor`."""
    hosts = hosts_of(context.address)
    facts = hosts.run(_FACTS, context.left_s)
    context.keep("hosts.json", json.dumps([_told(answer) for answer in facts], indent=1))
    # Without an address the application's cluster is its own, and none may answer yet.
    environment = {} if context.address else {"RAY_ADDRESS": "local"}
    found = hosts.run(_DOCTOR, context.left_s, environment)
    context.keep("doctor.json", json.dumps([_told(answer) for answer in found], indent=1))
    return judged(RunStage.DOCTOR, [*map(_findings, found), *map(_has_facts, facts)])


def all_hosts(context: StageContext) -> StageResult:
    """Asks every host once more, and compares them."""
    hosts = hosts_of(context.address)
    facts = hosts.run(_FACTS, context.left_s)
    context.keep("hosts.json", json.dumps([_told(answer) for answer in facts], indent=1))
    told = {answer.host: answer.last_json() or {} for answer in facts}
    measurements = [*map(_has_facts, facts)]
    for name in _EQUAL:
        differences = different({host: each.get(name) for host, each in told.items()}, name)
        words = "; ".join(differences) or "the same"
        measurements.append(
            Measurement(f"{name} of {len(told)} hosts", "the same", words, not differences)
        )
    return judged(RunStage.HOSTS, measurements)


def different(found: Mapping[str, Any], name: str) -> list[str]:
    """Returns in what hosts differ, a phrase each; what they have is by host. Pure.

    Of objects only those fields are told that are not the same everywhere. Nothing of nobody is not
    the same.
    """
    if not found:
        return [f"{name} is told by no host"]
    if all(isinstance(each, dict) for each in found.values()):
        fields = sorted({field for each in found.values() for field in each})
        return [
            words
            for field in fields
            for words in different({host: each.get(field) for host, each in found.items()}, field)
        ]
    if len({json.dumps(each, sort_keys=True) for each in found.values()}) <= 1:
        return []
    return [f"{name} is {', '.join(f'{each} on {host}' for host, each in found.items())}"]


def _told(answer: HostAnswer) -> dict[str, Any]:
    try:
        told = json.loads(answer.output)
    except ValueError:
        told = {"said": answer.complaint()}
    return {"host": answer.host, "status": answer.status, "told": told}


def _findings(answer: HostAnswer) -> Measurement:
    what = f"doctor on {answer.host}"
    # It prints one object over many lines.
    try:
        findings = json.loads(answer.output)["findings"]
    except (ValueError, KeyError):
        return Measurement(what, "an answer", answer.complaint(), is_met=False)
    errors = [f"{each['what']}: {each['found']}" for each in findings if each["level"] == "error"]
    warnings = sum(each["level"] == "warning" for each in findings)
    words = "; ".join(errors) or f"{len(findings)} findings, {warnings} of them warnings"
    return Measurement(what, "no error", words, is_met=not errors)


def _has_facts(answer: HostAnswer) -> Measurement:
    told = answer.last_json()
    if told is None:
        return Measurement(f"facts of {answer.host}", "an answer", answer.complaint(), is_met=False)
    words = (
        f"{told['num_cpus']} CPUs, {told['memory_bytes'] / 2**30:.0f} GiB,"
        f" {len(told['chip_files'])} chip files, Python {told['python']}"
    )
    return Measurement(f"facts of {answer.host}", "", words)
