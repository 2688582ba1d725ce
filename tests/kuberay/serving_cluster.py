"""An emulated cluster on which the whole application runs, deployed by the operator.

Beside what `EmulatedCluster` has: Ray's own dashboard, to which the operator sends what stands in
the RayService, the slice provisioner's process with all of its defaults, and the settings of Ray
Serve that our manifests give every pod. The parts that run in gateways' pods are on the head here:
those pods are no Ray nodes. Hosts have no metadata server.
"""

import tempfile
from pathlib import Path
from typing import Any

from control_plane.server import ControlPlane

from deployments.start.ports import free_ports
from deployments.start.serve import child_environment, dashboard_port
from serving.slices.host_agent import NO_METADATA
from serving.slices.metadata_client import HOST_VARIABLE
from serving.slices.probe import SIMULATED_VARIABLE
from tests.e2e.answers import Answers

from .cluster import EmulatedCluster
from .dashboard import Dashboard, ServeDashboard
from .installed import Installed, Place, installed
from .prober import Prober
from .sidecar import Sidecar

Json = dict[str, Any]


class ServingCluster(EmulatedCluster):
    """What a values file renders, on this machine. A context manager.

    `application` is what answers over HTTP, once there is a gateway.
    """

    def __init__(
        self,
        plane: ControlPlane,
        raw: Json,
        delays_s: dict[str, float | None],
        pace: dict[str, float],
    ) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="swf-")
        self.place = Place(free_ports(1)[0], pace, Path(self._files.name))
        self.installed: Installed = installed(raw, self.place)
        super().__init__(
            plane,
            self.installed.cluster,
            delays_s,
            service=self.installed.service,
            needed=self.installed.around,
        )
        # This process is a driver of the cluster, and has no token of it.
        environment = child_environment({"RAY_AUTH_MODE": "disabled"}, str(self.folder))
        self._dashboard_port = dashboard_port(environment)
        # It is the environment of a driver that starts a cluster of its own.
        del environment["RAY_ADDRESS"]
        self._serve_environment = environment
        self.application = Answers(f"http://127.0.0.1:{self.place.port}", self.place.api_key)

    def _start(self) -> None:
        self._stack.callback(self._files.cleanup)
        super()._start()
        url = self.application.base_url
        self._stack.enter_context(Prober(self.kubernetes, self.namespace, url))
        self.provisioner = Sidecar(self)
        self.provisioner.start()
        self._stack.callback(self.provisioner.kill)

    def _dashboard(self) -> Dashboard:
        return ServeDashboard(f"http://127.0.0.1:{self._dashboard_port}")

    def _head_options(self) -> dict[str, object]:
        return super()._head_options() | {
            "include_dashboard": True,
            "dashboard_port": self._dashboard_port,
        }

    def _ray_environment(self) -> dict[str, str]:
        no_chips = {SIMULATED_VARIABLE: "1", HOST_VARIABLE: NO_METADATA}
        return self._serve_environment | no_chips | super()._ray_environment()

    def logs(self) -> str:
        """What the provisioner has printed, and the last lines of every log of Serve."""
        folder = self.folder / "ray" / "session_latest" / "logs" / "serve"
        tails = (f"{path.name}\n{_tail(path)}" for path in sorted(folder.glob("*.log")))
        return "\n".join((self.provisioner.log(), *tails))


def _tail(path: Path, num_lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
