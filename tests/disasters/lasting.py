"""An application on a simulated cluster whose head may die, as these tests run it.

The places are those of our manifests: nothing of the application on the head, gateways and slice
replicas on two hosts without chips, whose own HTTP proxies answer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from serving.launch import free_ports
from tests.e2e.application import RunningApplication, serve_config


class LastingApplication(RunningApplication):
    """Started by `slicewise sim up --redis`."""

    def __init__(self, args: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        self.gateway_port = free_ports(1)[0]
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
        self.config_path.write_text(yaml.safe_dump(config))
        return self.config_path
