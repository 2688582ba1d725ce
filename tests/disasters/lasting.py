"""An application on a simulated cluster whose head may die, as these tests run it.

The places are those of our manifests: nothing of the application on the head, gateways and slice
replicas on two hosts without chips, whose own HTTP proxies answer. The policy scales it.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.simulation.control import ControlError, call
from deployments.start.ports import free_ports
from tests.e2e.application import (
    PROJECT_ROOT,
    Role,
    RunningApplication,
    StartError,
    application_args,
    linked_engines,
    paced_model,
    serve_config,
)

# A start of some twenty processes, on a machine that may be busy with other tests.
START_TIMEOUT_S = 420.0
# Which gateway answers is left to the proxies.
_EACH_ANSWERS_S = 120.0
MODEL = "paced"
SHAPE = {"generation": "v6e", "topology": "1x1"}
# What must be the same processes before and after the head was away.
LASTING = (
    Role.GATEWAY,
    Role.DIRECTORY,
    Role.SLICE_REPLICA,
    Role.ENGINE_HOST,
    Role.HOST_AGENT,
)


class LastingApplication(RunningApplication):
    """Started by `slicewise sim up --redis`. With a `policy` it is scaled."""

    def __init__(
        self,
        args: Mapping[str, Any],
        plan: Mapping[str, Any],
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        self.gateway_port = free_ports(1)[0]
        self._policy = policy
        super().__init__(
            args,
            through="sim",
            options=["--redis"],
            plan={"head_cpus": 0, "gateway_hosts": 2, **plan},
            environment={"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.gateway_port)},
        )
        self.base_url = f"http://127.0.0.1:{self.gateway_port}"

    def write_config(self, args: Mapping[str, Any]) -> Path:
        config = serve_config(args, self.port) | {"proxy_location": "EveryNode"}
        if self._policy is not None:
            (application,) = config["applications"]
            application["autoscaling_policy"] = self._policy
        self.config_path.write_text(yaml.safe_dump(config))
        return self.config_path

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        super().wait_ready(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while len(self.processes(Role.GATEWAY)) < self.args["gateway"]["replicas"]:
            if time.monotonic() > deadline_s:
                raise StartError(f"not every gateway has come\n{self.log_tail()}")
            time.sleep(0.1)

    def lasting_processes(self) -> dict[Role, set[int]]:
        """The processes that a head's death must not touch, by role."""
        return {role: {each.pid for each in self.processes(role)} for role in LASTING}

    def wait_linked(self, count: int, timeout_s: float) -> dict[str, Any]:
        """Waits until so many engines, no fewer and no more, take requests; `/fleet` then."""
        return self.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: count}, timeout_s)

    def wait_linked_at_least(self, count: int, timeout_s: float) -> dict[str, Any]:
        """The same, with what the policy has added."""
        return self.wait_fleet(lambda fleet: linked_engines(fleet)[MODEL] >= count, timeout_s)


def model_on(*deployments: Mapping[str, Any], pace: Mapping[str, Any]) -> dict[str, Any]:
    """The paced model on small slices of these deployments."""
    whole = [{"num_cpus": 0.01, "slice": SHAPE, **each} for each in deployments]
    return paced_model(pace=pace, deployments=whole)


def args_of(model: Mapping[str, Any], **gateway: Any) -> dict[str, Any]:
    """Two gateways, one for each host that they may be on."""
    # A machine that is busy with other tests makes gateways late, which is not the subject here.
    given = {"replicas": 2, "num_cpus": 0.01, "max_behind_s": 60.0, **gateway}
    return application_args(model, gateway=given)


def shipped_policy(classes: Mapping[str, Any], **rules: Any) -> dict[str, Any]:
    """The policy of the shipped scaling application, for these classes and with these rules."""
    path = PROJECT_ROOT / "deployments" / "sim" / "autoscaling.yaml"
    policy: dict[str, Any] = yaml.safe_load(path.read_text())["applications"][0][
        "autoscaling_policy"
    ]
    (settings,) = policy["policy_kwargs"]["models"].values()
    settings["profile"] |= {"model": MODEL, "topology": SHAPE["topology"]}
    settings["rules"] |= rules
    settings["classes"] = dict(classes)
    policy["policy_kwargs"]["models"] = {MODEL: settings}
    return policy


async def on(application: RunningApplication, command: str, **arguments: object) -> None:
    """Has the simulated cluster do something, off the event loop that carries the load."""
    await asyncio.to_thread(application.simulation, command, **arguments)


async def start_head(application: RunningApplication) -> None:
    """Starts a head again; on a busy machine Ray's 30 s may be too short for it."""
    await asyncio.to_thread(start_head_on, application.control_socket)


def start_head_on(control_socket: Path) -> None:
    """The same by the cluster's control socket."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            call(control_socket, "start_head")
        except ControlError as error:
            if "did not come up" not in str(error) or time.monotonic() > deadline_s:
                raise
        else:
            return


def resumes(application: RunningApplication) -> int:
    """Requests that were moved to another engine so far, over all gateways; asks each of them."""
    counts: dict[str, int] = {}

    def have_all_answered(fleet: dict[str, Any]) -> bool:
        counts[fleet["gateway"]["id"]] = fleet["models"][0]["resumes"]
        return len(counts) == application.args["gateway"]["replicas"]

    application.wait_fleet(have_all_answered, _EACH_ANSWERS_S)
    return sum(counts.values())


def report(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """A measured line, for whoever runs these tests."""
    with capsys.disabled():
        sys.stdout.write(f"\n    {line}\n")
