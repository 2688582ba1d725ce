"""Defines `slicewise first-run`: it wires a run, and prints what it comes to."""

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import yaml

from deployments.first_run.order import RunStage, chosen_stages
from deployments.first_run.record.comparison import RunUnreadableError, compare_runs, read_run
from deployments.first_run.record.evidence import ARCHIVE, EvidenceFolder
from deployments.first_run.record.masking import secrets_of
from deployments.first_run.runner import FirstRun, RunInterruptedError, RunOrder
from deployments.terminal import build_table, plain_lines
from serving.artifacts.object_store.address import is_bucket, open_store
from serving.config.check import check_serve_config
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.errors import UnsupportedVllmError

_FAILED, _UNUSABLE = 1, 2
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def first_run_command(
    *,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A serve_config.yaml to be served.")
    ] = None,
    out: Annotated[
        str,
        typer.Option(help="Folder, or gs:// or s3:// address, for results and the archive."),
    ] = "first-run",
    only: Annotated[
        RunStage | None, typer.Option(help="One stage, with what has to run before it.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A running Ray cluster to join. [default: one of its own]"
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model for the references. [default: the one that is served]"
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(min=0.1, max=20.0, help="Factor of all deadlines: larger models, busy hosts."),
    ] = 1.0,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Print what differs between two runs, and end."),
    ] = None,
) -> None:
    """Start FILE's engines for the first time on this hardware, and record all that it shows.

    Exit status: 0 if every stage passed or was skipped, 1 if one failed, 2 if FILE or --out is of
    no use.
    """
    if compare is not None:
        _compare(*compare)
        return
    if file is None:
        _refuse("name a FILE to be served, or two runs to --compare")
    settings = _settings(file)
    # Short: Ray's sockets lie below it.
    scratch = Path(tempfile.mkdtemp(prefix="f-"))
    order = RunOrder(
        file.resolve(), settings, chosen_stages(only), scratch, address, reference, patience
    )
    for number in _ENDING:
        signal.signal(number, _interrupt)
    try:
        evidence = _evidence(out, settings)
        run = FirstRun(order, evidence, _say)
        verdict = run.run()
        evidence.close()
        typer.echo(f"\n{run.text}")
        _say("passed" if verdict.has_passed else f"failed: {verdict.reason}")
        _say(f"send back {_where(out, evidence)}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    raise typer.Exit(0 if verdict.has_passed else _FAILED)


def _evidence(out: str, settings: object) -> EvidenceFolder:
    secrets = secrets_of(os.environ, settings)
    try:
        if is_bucket(out):
            folder = Path(tempfile.mkdtemp(prefix="first-run-"))
            return EvidenceFolder(folder, open_store(out), secrets)
        return EvidenceFolder(Path(out), None, secrets)
    except (OSError, ValueError) as error:
        _refuse(f"--out {out}: {error}")


def _settings(file: Path) -> dict[str, object]:
    try:
        settings = load_yaml(file.read_text(encoding="utf-8"))
        problems = check_serve_config(settings, installed_vllm_args()).problems
    except (OSError, UnicodeDecodeError, yaml.YAMLError, UnsupportedVllmError) as error:
        _refuse(f"{file}: {error}")
    if problems or not isinstance(settings, dict):
        _refuse(f"{file} cannot be served:\n" + "\n".join(f"  {each}" for each in problems))
    return settings


def _compare(before: Path, after: Path) -> None:
    try:
        rows = compare_runs(read_run(before), read_run(after))
    except RunUnreadableError as error:
        _refuse(f"{error}")
    if not rows:
        typer.echo("no difference")
        return
    table = build_table(("STAGE", "WHAT", f"{before}", f"{after}"), rows, 4)
    typer.echo("\n".join(plain_lines(table)))


def _where(out: str, evidence: EvidenceFolder) -> str:
    """Returns where the archive is: elsewhere on this machine, if `out` does not have all of it."""
    if is_bucket(out):
        if not evidence.faults:
            shutil.rmtree(evidence.folder, ignore_errors=True)
            return f"{out.rstrip('/')}/{ARCHIVE}"
    elif evidence.has_archive:
        return f"{out}/{ARCHIVE}"
    path = evidence.folder / ARCHIVE if evidence.has_archive else evidence.archive_elsewhere()
    if path is None:
        return f"what is in {evidence.folder}: there is no room for an archive"
    return f"{path}, because {out} does not have all of it"


def _interrupt(number: int, _frame: object) -> None:
    # Once: what is written then must not be cut short by the next.
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise RunInterruptedError(f"the run was ended by {signal.Signals(number).name}")


def _say(text: str) -> None:
    typer.echo(f"first-run: {text}")


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"first-run: {reason}", err=True)
    raise typer.Exit(_UNUSABLE)
