"""`slicewise provision`, through its front door, as far as it comes without a cluster."""

import pytest
from click.testing import Result
from typer.testing import CliRunner

from autoscaling.provisioning.kubernetes import HOST_VARIABLE
from deployments.cli import COMMAND_GROUP, build_cli, entry_points


def provision(*arguments: str, environment: dict[str, str | None] | None = None) -> Result:
    cli = build_cli(entry_points(group=COMMAND_GROUP))
    named = ["provision", "--namespace", "serving", "--raycluster", "llm-tpu", *arguments]
    return CliRunner().invoke(cli, named, env=environment)


def test_command_is_registered_and_explains_itself() -> None:
    answer = provision("--help")
    assert answer.exit_code == 0
    assert "--raycluster" in answer.output


def test_command_outside_a_pod_asks_for_the_address() -> None:
    answer = provision(environment={HOST_VARIABLE: None})
    assert answer.exit_code == 2
    assert "--kubernetes-url" in answer.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--idle", "1"], "one lease"),
        (["--min-change-interval", "-1"], "at least 0"),
        (["--interval", "0"], "0.1"),
    ],
)
def test_command_refuses_times_that_make_no_sense(arguments: list[str], expected: str) -> None:
    answer = provision(*arguments)
    assert answer.exit_code == 2
    assert expected in answer.output
