"""The `slicewise` command: wiring only, one module per command.

A command of another package registers itself as an entry point of the group `slicewise.commands`,
because imports point down: `deployments` names neither `autoscaling` nor `loadtest`. The entry
point's name is the command's; it is a function, or a `typer.Typer` with commands of its own.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from deployments.compile_cache import programs
from deployments.doctor.command import doctor_command
from deployments.engine_plan import engine_plan_command
from deployments.first_run.command import first_run_command
from deployments.ledger.command import ledger_command
from deployments.manifests.command import render_command
from deployments.observe.command import observe_command
from deployments.rollout.command import rollout_command
from deployments.simulation.command import sim
from deployments.start.serve import serve_command
from deployments.start.tpu_host import ray_environment_command, ray_options_command
from deployments.status.batches import batches_command
from deployments.status.command import status_command
from deployments.status.explain import explain_command
from deployments.validation.command import validate_command
from serving.config.check import check_command

COMMAND_GROUP = "slicewise.commands"
_config = typer.Typer(help="Work on a serve_config.yaml.", no_args_is_help=True)
# Without a callback typer would drop the name of an only command.
_config.callback()(lambda: None)
_config.command("check")(check_command)
# In the order in which the help has them.
_OWN_COMMANDS: dict[str, Any] = {
    "config": _config,
    "serve": serve_command,
    "ray-environment": ray_environment_command,
    "ray-options": ray_options_command,
    "status": status_command,
    "explain": explain_command,
    "batches": batches_command,
    "doctor": doctor_command,
    "first-run": first_run_command,
    "engine-plan": engine_plan_command,
    "ledger": ledger_command,
    "observe": observe_command,
    "render": render_command,
    "validate": validate_command,
    "rollout": rollout_command,
    "programs": programs,
    "sim": sim,
}


def build_cli(commands: Iterable[EntryPoint]) -> typer.Typer:
    """The whole command line: our own commands and those of `commands`."""
    cli = typer.Typer(
        help="Slicewise: large language models on Cloud TPUs with Ray Serve.",
        no_args_is_help=True,
        add_completion=False,
        # A rich traceback prints local variables, and with them API keys.
        pretty_exceptions_enable=False,
    )
    others = {entry_point.name: entry_point.load() for entry_point in commands}
    for name, command in (_OWN_COMMANDS | others).items():
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=name)
        else:
            cli.command(name)(command)
    return cli


def needed(arguments: Sequence[str], commands: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Returns those of `commands` that have to be loaded for these arguments of the command line.

    A command that is named needs no other: each brings libraries of its own, which take seconds.
    For help, and for an unknown name, all are needed.
    """
    known = list(commands)
    first = next(iter(arguments), "")
    if first in _OWN_COMMANDS:
        return []
    return [command for command in known if command.name == first] or known


def main() -> None:
    """Runs the command line of this process."""
    build_cli(needed(sys.argv[1:], entry_points(group=COMMAND_GROUP)))()


if __name__ == "__main__":
    main()
