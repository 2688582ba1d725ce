"""The `slicewise` command: wiring only, one module per command.

A command of another package registers itself as an entry point of the group `slicewise.commands`,
because imports point down: `deployments` names neither `autoscaling` nor `loadtest`. The entry
point's name is the command's; it is a function, or a `typer.Typer` with commands of its own.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points

import typer

from deployments.compile_cache import programs
from deployments.doctor.command import doctor_command
from deployments.engine_plan import engine_plan_command
from deployments.ledger.command import ledger_command
from deployments.manifests.command import render_command
from deployments.observe.command import observe_command
from deployments.serve import serve_command
from deployments.simulation.command import sim
from deployments.status import status_command
from deployments.validation.command import validate_command
from serving.config.check import check_command

COMMAND_GROUP = "slicewise.commands"
_OWN_COMMANDS = frozenset(
    {
        "config",
        "doctor",
        "engine-plan",
        "ledger",
        "observe",
        "programs",
        "render",
        "serve",
        "status",
        "sim",
        "validate",
    }
)


def build_cli(commands: Iterable[EntryPoint]) -> typer.Typer:
    """The whole command line: our own commands and those of `commands`."""
    cli = typer.Typer(
        help="Slicewise: large language models on Cloud TPUs with Ray Serve.",
        no_args_is_help=True,
        add_completion=False,
        # A rich traceback prints local variables, and with them API keys.
        pretty_exceptions_enable=False,
    )
    config = typer.Typer(help="Work on a serve_config.yaml.", no_args_is_help=True)
    # Without a callback typer would drop the name of an only command.
    config.callback()(_config_group)
    config.command("check")(check_command)
    cli.add_typer(config, name="config")
    cli.command("serve")(serve_command)
    cli.command("status")(status_command)
    cli.command("doctor")(doctor_command)
    cli.command("engine-plan")(engine_plan_command)
    cli.command("ledger")(ledger_command)
    cli.command("observe")(observe_command)
    cli.command("render")(render_command)
    cli.command("validate")(validate_command)
    cli.add_typer(programs, name="programs")
    cli.add_typer(sim, name="sim")
    for entry_point in commands:
        command = entry_point.load()
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=entry_point.name)
        else:
            cli.command(entry_point.name)(command)
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


def _config_group() -> None:
    """Work on a serve_config.yaml."""


if __name__ == "__main__":
    main()
