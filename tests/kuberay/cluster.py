"""The whole emulation: Ray's head here, its autoscaler beside it, KubeRay and GKE behind an API.

The autoscaler is the process that KubeRay runs in the head pod, with nothing replaced: it is told
the API server's address, its CA and a client certificate through its environment.
"""

import contextlib
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from autoscaling.provisioning.kubernetes import KubernetesAccess
from autoscaling.provisioning.raycluster import GROUP_LABEL
from deployments.serve import free_ports

from .api_server import HEAD_POD_GRANTS, MIRROR_GRANTS, NAMESPACE, ApiServer
from .cloud import Cloud, CloudThread
from .objects import HEAD_POD, RAYCLUSTER, head_pod
from .operator import Operator, OperatorThread
from .raylets import OBJECT_STORE_BYTES, RayletHosts, descendants
from .schema import CRD_FOLDER, crd_schema
from .store import Json, Store

AUTOSCALER = "ray-autoscaler"
PROVISIONER = "slice-provisioner"
TOKEN = "token-of-the-provisioner"
# Ray's own default is 5 s; everything that the autoscaler would do happens the sooner.
_AUTOSCALER_INTERVAL_S = 1
_AUTOSCALER_PROGRAM = """
import sys
from ray.autoscaler._private.kuberay.run_autoscaler import run_kuberay_autoscaler
run_kuberay_autoscaler(*sys.argv[1:])
"""
_POLL_S = 0.1
_HEAD_STARTS = 3


class EmulatedCluster:
    """A RayCluster on this machine. A context manager; this process is connected to it as a driver.

    `delays_s` is how long GKE takes for a slice, by worker group.
    """

    def __init__(
        self,
        cluster: Json,
        delays_s: dict[str, float | None],
        *,
        service: Json | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        # Ray's sockets lie below, and their paths may have at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="swk-", dir="/tmp"))
        has_crds = CRD_FOLDER.is_dir()
        names = ("rayclusters", "rayservices") if has_crds else ()
        self.store = Store({name: crd_schema(name) for name in names})
        self.store.create("rayclusters", cluster)
        self.store.create("pods", head_pod())
        if service is not None:
            self.store.create("rayservices", service)
        self._delays_s = delays_s
        self.started_at_s = time.monotonic()

    def __enter__(self) -> "EmulatedCluster":
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        enter = self._stack.enter_context
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        environment = enter(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            environment.delenv(name)
        for name, value in self._ray_environment().items():
            environment.setenv(name, value)
        self._stack.callback(self._kill_leftovers)
        self.ray_cluster = self._start_head()
        self._stack.callback(self._stop_head)
        # The port is taken once the server is made; it answers once it is entered.
        self.api = enter(ApiServer(self.store, self.folder))
        self.api.grant(AUTOSCALER, HEAD_POD_GRANTS)
        self.api.grant(PROVISIONER, HEAD_POD_GRANTS | MIRROR_GRANTS, TOKEN)
        (self.folder / "token").write_text(TOKEN)
        self.hosts = RayletHosts(self.ray_cluster)
        self.cloud = Cloud(self.store, self.hosts, self._delays_s)
        enter(CloudThread(self.cloud))
        enter(OperatorThread(self.store, Operator(self.store, random.Random(0))))
        ray.init(address=self.address, namespace="serve", log_to_driver=False, logging_level=40)
        self._stack.callback(ray.shutdown)
        enter(self._autoscaler())

    def _start_head(self) -> Cluster:
        """Ray's head. Ray waits 30 s for it and no longer; a busy machine may need another try."""
        for _ in range(_HEAD_STARTS - 1):
            with contextlib.suppress(_SlowStartError):
                return _head_cluster()
            self._kill_leftovers()
            with warnings.catch_warnings():
                # What Ray had opened for it is nobody's, and would be held against a later test.
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
        return _head_cluster()

    @property
    def address(self) -> str:
        """Ray's address."""
        return str(self.ray_cluster.address)

    @property
    def access(self) -> KubernetesAccess:
        """How the provisioner speaks with the API."""
        return KubernetesAccess(self.api.url, NAMESPACE, self.folder / "token", self.api.ca_file)

    def group(self, name: str) -> Json:
        """A worker group as the API server has it."""
        spec = self.store.get("rayclusters", RAYCLUSTER)["spec"]
        found: Json = next(each for each in spec["workerGroupSpecs"] if each["groupName"] == name)
        return found

    def pods(self, group: str) -> list[Json]:
        """A group's pods, those being deleted included."""
        return self.store.list("pods", {GROUP_LABEL: group})

    def edit_group(self, name: str, **fields: Any) -> None:
        """What a user does with `kubectl edit`."""
        with self.store.edit("rayclusters", RAYCLUSTER) as stored:
            for group in stored["spec"]["workerGroupSpecs"]:
                if group["groupName"] == name:
                    group.update(fields)

    def whole_slices(self, group: str) -> dict[str, frozenset[str]]:
        """The slices of a group whose every host is a live Ray node: node ids by slice name."""
        num_hosts = self.group(group)["numOfHosts"]
        found: dict[str, set[str]] = {}
        for node in ray.nodes():
            labels = node.get("Labels") or {}
            if node["Alive"] and labels.get("ray.io/node-group") == group:
                found.setdefault(labels["ray.io/tpu-slice-name"], set()).add(node["NodeID"])
        return {
            name: frozenset(ids) for name, ids in sorted(found.items()) if len(ids) == num_hosts
        }

    def wait(self, is_so: Callable[[], bool], what: str, timeout_s: float = 120.0) -> float:
        """Waits until `is_so`; the seconds it took. Not for use on an event loop."""
        began_s = time.monotonic()
        while not is_so():
            assert time.monotonic() < began_s + timeout_s, f"not within {timeout_s:g} s: {what}"
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    def autoscaler_log(self) -> str:
        """What the autoscaler's process has printed."""
        return (self.folder / "autoscaler.log").read_text(errors="replace")

    @contextlib.contextmanager
    def _autoscaler(self) -> Iterator[None]:
        certificate, key = self.api.authority.client(AUTOSCALER)
        environment = os.environ | {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self.api.port),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(certificate),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(key),
            "RAY_KUBERAY_CA_CERT_PATH": str(self.api.ca_file),
            "RAY_HEAD_POD_NAME": HEAD_POD,
            "AUTOSCALER_UPDATE_INTERVAL_S": str(_AUTOSCALER_INTERVAL_S),
            "AUTOSCALER_METRIC_PORT": str(free_ports(1)[0]),
            # It asks `ray health-check` whether the head is there.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = [sys.executable, "-c", _AUTOSCALER_PROGRAM, RAYCLUSTER, NAMESPACE, self.address]
        with (self.folder / "autoscaler.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self.wait(lambda: bool(self.api.requests(AUTOSCALER, "list")), "autoscaler is up")
            yield
        finally:
            process.kill()
            process.wait()

    def _ray_environment(self) -> dict[str, str]:
        return {
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_enable_autoscaler_v2": "1",
        }

    def _stop_head(self) -> None:
        below = descendants(self.ray_cluster.head_node)
        self.ray_cluster.remove_node(self.ray_cluster.head_node)
        _kill(below)

    def _kill_leftovers(self) -> None:
        """Ray's daemons are nobody's child; ours are known by their folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get("RAY_TMPDIR") == str(self.folder)
                if is_ours and process.pid != os.getpid():
                    found.append(process)
        _kill(found)


class _SlowStartError(Exception):
    """Ray did not see its own head in time."""


def _head_cluster() -> Cluster:
    try:
        return Cluster(
            initialize_head=True, shutdown_at_exit=False, head_node_args=_head_node_args()
        )
    except Exception as error:
        if "timed out during startup" in str(error):  # Ray's only word for it
            raise _SlowStartError(str(error)) from None
        raise


def _head_node_args() -> dict[str, object]:
    return {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        # The autoscaler runs beside it, as in a head pod.
        "no_monitor": True,
        "env_vars": {"RAY_CLOUD_INSTANCE_ID": HEAD_POD, "RAY_NODE_TYPE_NAME": "headgroup"},
        "_system_config": {"enable_autoscaler_v2": True},
    }


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
