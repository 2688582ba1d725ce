"""Defines `slicewise rollout`: what `kubectl apply` would do to the cluster that runs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deployments.applied import read_running
from deployments.kubectl import Kubectl, KubectlError
from deployments.rollout.chips import allowed_chips
from deployments.rollout.decision import Outcome, Rollout, decide_rollout
from deployments.rollout.gather import ManifestsUnreadableError, read_other_quotas, read_wanted
from deployments.terminal import printable

_UNUSABLE = 1
_VERDICTS = {
    Outcome.NOTHING: "nothing would change",
    Outcome.IN_PLACE: "in place: no pod is replaced",
    Outcome.ROLLS: "in place: pods that run are replaced one after the other",
    Outcome.SECOND_CLUSTER: "a second cluster beside the first",
    Outcome.NOT_AS_APPLIED: "not as applied: part of it would not take effect",
    Outcome.FIRST_INSTALLATION: "nothing of this name runs: a first installation",
}


class Variant(StrEnum):
    """Which rendered variant would be applied."""

    RAYSERVICE = "rayservice"
    RAYCLUSTER = "raycluster"


_KINDS = {Variant.RAYSERVICE: "RayService", Variant.RAYCLUSTER: "RayCluster"}


def rollout_command(
    path: Annotated[Path, typer.Argument(exists=True, readable=True, metavar="VALUES_OR_DIR")],
    *,
    variant: Annotated[
        Variant, typer.Option(help="Which of the rendered variants.")
    ] = Variant.RAYSERVICE,
    context: Annotated[
        str | None, typer.Option(help="kubectl's context. [default: the current one]")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="kubectl's file. [default: as kubectl has it]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what applying would do to the cluster that runs, before anything is done.

    Exits with 0 if nothing changes, 3 if nothing runs yet, 4 in place, 5 if pods are replaced one
    after the other, 6 for a second cluster, 7 if part would not take effect; 1 on an error.
    """
    try:
        wanted, quotas = read_wanted(path, _KINDS[variant])
        kubectl = Kubectl(context, kubeconfig)
        metadata = wanted["metadata"]
        running = read_running(kubectl, wanted["kind"], metadata["name"], metadata["namespace"])
        if running.cluster is not None:
            # With the schema's defaults, and as kubectl merges it with what it applied last.
            wanted = kubectl.dry_run(wanted)
            quotas += read_other_quotas(kubectl, wanted, quotas)
    except (ManifestsUnreadableError, KubectlError) as error:
        typer.echo(f"slicewise rollout: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    rollout = decide_rollout(wanted, running, allowed_chips(quotas))
    if as_json:
        typer.echo(
            json.dumps(asdict(rollout) | {"outcome": rollout.outcome.name.lower()}, indent=2)
        )
    else:
        for line in report_lines(rollout):
            typer.echo(line)
    raise typer.Exit(int(rollout.outcome))


def report_lines(rollout: Rollout) -> Iterator[str]:
    """Yields the report for people: each step, what would not take effect, the verdict last."""
    for step in rollout.steps:
        yield f"{printable(step.subject)}: {printable(step.what)}"
        yield f"  takes effect: {printable(step.effect)}"
    for hindrance in rollout.hindrances:
        yield f"{printable(hindrance.subject)}: {printable(hindrance.what)}"
        yield f"  does not take effect: {printable(hindrance.reason)}"
        yield f"  what works: {printable(hindrance.way)}"
    if rollout.chips is not None:
        yield f"chips: {rollout.chips}"
    for line in rollout.notes:
        yield f"note: {printable(line)}"
    yield _VERDICTS[rollout.outcome]
