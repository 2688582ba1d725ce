"""Serves on a simulated cluster whose head may die: its dashboard deploys, as with KubeRay.

`serve run` is a driver and ends with the head that it is connected to. What `serve deploy` leaves
behind is in the cluster alone. Owns the environment of such a cluster, and the wait for its end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from deployments.simulation.plan import SimulationPlan
from serving.domain.errors import ConfigError, Problem

_POLL_S = 0.5
_DEPLOY_TIMEOUT_S = 120
PROXY_PORT_VARIABLE = "RAY_SERVE_WORKER_PROXY_HTTP_PORT"


def lasting_environment(inherited: Mapping[str, str], proxy_port: int) -> dict[str, str]:
    """Returns what is added to `child_environment` so that a cluster outlives its head.

    `proxy_port` is where the gateway hosts' HTTP proxies listen. The head has a proxy too, on the
    port of the configuration; in a cluster of Kubernetes no Service leads to it.
    """
    ours = {
        # A head that is away for hours costs scaling and no engine. After this time every raylet
        # ends itself: Ray's own default is 60 s, and KubeRay 1.7 gives 600 s where we give nothing.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
        # As in our manifests. Of several HAProxies on one machine all would have the same ports.
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        PROXY_PORT_VARIABLE: str(proxy_port),
    }
    return {**ours, **inherited}


def proxy_url(environment: Mapping[str, str]) -> str:
    """Returns where the gateway hosts of a cluster with this `lasting_environment` answer."""
    return f"http://127.0.0.1:{environment[PROXY_PORT_VARIABLE]}"


def ensure_lasting(plan: SimulationPlan, settings: Mapping[str, Any]) -> None:
    """Refuses what would die with the head.

    Raises:
        ConfigError: gateways would be on the head, or the only HTTP proxy would.
    """
    problems = []
    if plan.gateway_hosts == 0:
        words = "nothing but the head has room for gateways"
        problems.append(Problem("gateway_hosts", words, "allowed with --redis: at least 1", "0"))
    if plan.head_cpus > 0:
        words = "what the head has room for dies with it"
        given = f"{plan.head_cpus:g}"
        problems.append(Problem("head_cpus", words, "allowed with --redis: 0", given))
    location = settings.get("proxy_location", "EveryNode")
    if location != "EveryNode":
        words = "the only proxy would be on the head"
        allowed = "allowed with --redis: EveryNode"
        problems.append(Problem("proxy_location", words, allowed, str(location)))
    if problems:
        raise ConfigError(problems)


def serve_deployed(config: Path, dashboard_url: str, url: str) -> int:
    """Deploys, prints when the gateways answer at `url`, and waits for Ctrl-C; the exit code."""
    is_over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: is_over.set())
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    deploy = subprocess.run(
        [
            str(Path(sys.executable).with_name("serve")),
            "deploy", "--address", dashboard_url, str(config),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_DEPLOY_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if deploy.returncode:
        typer.echo(f"slicewise: serve deploy failed:\n{deploy.stdout}{deploy.stderr}", err=True)
        return 1
    typer.echo(f"slicewise: deployed through {dashboard_url}")
    while not is_over.is_set():
        if _answers(url):
            typer.echo(f"\nServing on {url}. Try it: slicewise status --url {url}")
            break
        is_over.wait(_POLL_S)
    is_over.wait()
    return 0


def _answers(url: str) -> bool:
    with (
        contextlib.suppress(OSError, ValueError),
        urllib.request.urlopen(f"{url}/health", timeout=2) as response,
    ):
        return bool(response.status == 200)
    return False
