"""The whole emulation: Ray's head here, its autoscaler beside it, KubeRay and GKE around them.

Everything acts in one namespace of a real control plane. The autoscaler is the process that KubeRay
runs in the head pod, with nothing replaced: it is told the API server's address, its CA and a
client certificate through its environment, and has the rights of the head's account.
"""

import contextlib
import copy
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from control_plane.api import Api, RefusedByServerError, wait
from control_plane.kubelet import HELD
from control_plane.proxy import Proxy
from control_plane.server import ControlPlane
from ray.cluster_utils import Cluster

from autoscaling.provisioning.kubernetes import KubernetesAccess
from autoscaling.provisioning.raycluster import GROUP_LABEL
from deployments.start.ports import free_ports

from .accounts import head_rules, make_account
from .by_hand import install
from .cloud import Cloud, CloudThread, Loss
from .dashboard import Dashboard, ToldDashboard
from .namespaces import own_namespace
from .objects import HEAD_ACCOUNT, RAYCLUSTER, RAYSERVICE
from .operator import Operator, OperatorThread
from .raylets import OBJECT_STORE_BYTES, RayletHosts, descendants

Json = dict[str, Any]

AUTOSCALER = "ray-autoscaler"
PROVISIONER = "slice-provisioner"
# Ray's own default is 5 s; everything that the autoscaler would do happens the sooner.
_AUTOSCALER_INTERVAL_S = 1
_AUTOSCALER_PROGRAM = """
import sys
from ray.autoscaler._private.kuberay.run_autoscaler import run_kuberay_autoscaler
run_kuberay_autoscaler(*sys.argv[1:])
"""
_HEAD_STARTS = 3


class EmulatedCluster:
    """A RayCluster on this machine. A context manager; this process is connected to it as a driver.

    `delays_s` is how long GKE takes for a slice, by worker group. With `service` that RayService
    has made the cluster. `needed` is what has to be there before it: accounts, priorities.
    """

    def __init__(
        self,
        plane: ControlPlane,
        cluster: Json,
        delays_s: dict[str, float | None],
        *,
        service: Json | None = None,
        needed: Sequence[Json] = (),
    ) -> None:
        self._plane = plane
        self._cluster, self._needed = copy.deepcopy(cluster), needed
        _hold(self._cluster["spec"])
        self._service = copy.deepcopy(service)
        if self._service is not None:
            _hold(self._service["spec"]["rayClusterConfig"])
        self._delays_s = delays_s
        self._stack = contextlib.ExitStack()
        # Ray's sockets lie below, and their paths may have at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="swk-", dir="/tmp"))
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
        self.namespace = enter(own_namespace(self.kubernetes))
        operator = self._install()
        self.ray_cluster = self._start_head()
        self._stack.callback(self._stop_head)
        self.api = enter(Proxy(self._plane))
        for name in (AUTOSCALER, PROVISIONER):
            token = self.kubernetes.request_token(self.namespace, HEAD_ACCOUNT)
            self.api.know(name, token)
        (self.folder / "token").write_text(token)
        self.hosts = RayletHosts(self.ray_cluster)
        self.cloud = Cloud(self.kubernetes, self.namespace, self._delays_s, self.hosts)
        enter(CloudThread(self.cloud))
        enter(OperatorThread(operator))
        ray.init(address=self.address, namespace="serve", log_to_driver=False, logging_level=40)
        self._stack.callback(ray.shutdown)
        # What is collected later, in whatever thread, calls Ray and ends the process (Ray 2.60).
        self._stack.callback(gc.collect)
        enter(self._autoscaler())

    def _install(self) -> Operator:
        """Everything but hosts; the head's pod has its name then, and no node yet."""
        make_account(self.kubernetes, self.namespace, HEAD_ACCOUNT, head_rules())
        for body in self._needed:
            namespace = {"namespace": self.namespace}
            self.kubernetes.apply(body | {"metadata": body["metadata"] | namespace})
        install(self.kubernetes, self.namespace, self._cluster, self._service)
        operator = Operator(self.kubernetes, self.namespace, self._dashboard(), random.Random(0))
        while operator.step():
            pass
        (head,) = self.pods("headgroup")
        self._head_pod = str(head["metadata"]["name"])
        return operator

    def _dashboard(self) -> Dashboard:
        """What the operator asks about Serve."""
        return ToldDashboard()

    def _head_options(self) -> dict[str, object]:
        """What Ray's head is started with."""
        return _head_node_args(self._head_pod)

    @property
    def kubernetes(self) -> Api:
        """An administrator's view of the API server."""
        return self._plane.api

    def _start_head(self) -> Cluster:
        """Ray's head. Ray waits 30 s for it and no longer; a busy machine may need another try."""
        for _ in range(_HEAD_STARTS - 1):
            with contextlib.suppress(_SlowStartError):
                return _head_cluster(self._head_options())
            self._kill_leftovers()
            with warnings.catch_warnings():
                # What Ray had opened for it is nobody's, and would be held against a later test.
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
        return _head_cluster(self._head_options())

    @property
    def address(self) -> str:
        """Ray's address."""
        return str(self.ray_cluster.address)

    @property
    def access(self) -> KubernetesAccess:
        """How the provisioner speaks with the API."""
        return KubernetesAccess(
            self.api.url, self.namespace, self.folder / "token", self.api.ca_file
        )

    def group(self, name: str) -> Json:
        """A worker group as the API server has it."""
        spec = self.kubernetes.get("RayCluster", self.namespace, RAYCLUSTER)["spec"]
        found: Json = next(each for each in spec["workerGroupSpecs"] if each["groupName"] == name)
        return found

    def rayservice(self) -> Json:
        """The RayService as the API server has it."""
        return self.kubernetes.get("RayService", self.namespace, RAYSERVICE)

    def pods(self, group: str) -> list[Json]:
        """A group's pods, those being deleted included."""
        return self.kubernetes.list("Pod", self.namespace, {GROUP_LABEL: group})

    def lose(self, slice_name: str, host: int = 0, how: Loss = Loss.FAILED) -> None:
        """A host of a slice, by KubeRay's index, is lost: its raylet at once, its pod as `how`."""
        self.cloud.lose(slice_name, host, how)

    def edit_group(self, name: str, **fields: Any) -> None:
        """What a user does with `kubectl edit`."""
        while True:
            found = self.kubernetes.get("RayCluster", self.namespace, RAYCLUSTER)
            for group in found["spec"]["workerGroupSpecs"]:
                if group["groupName"] == name:
                    group.update(fields)
            # Somebody else may have changed it meanwhile.
            with contextlib.suppress(RefusedByServerError):
                self.kubernetes.replace(found)
                return

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
        wait(is_so, what, timeout_s)
        return time.monotonic() - began_s

    def autoscaler_log(self) -> str:
        """What the autoscaler's process has printed."""
        return (self.folder / "autoscaler.log").read_text(errors="replace")

    @contextlib.contextmanager
    def _autoscaler(self) -> Iterator[None]:
        certificate, key = self._plane.authority.client(AUTOSCALER)
        environment = os.environ | {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self.api.port),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(certificate),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(key),
            "RAY_KUBERAY_CA_CERT_PATH": str(self.api.ca_file),
            "RAY_HEAD_POD_NAME": self._head_pod,
            "AUTOSCALER_UPDATE_INTERVAL_S": str(_AUTOSCALER_INTERVAL_S),
            "AUTOSCALER_METRIC_PORT": str(free_ports(1)[0]),
            # It asks `ray health-check` whether the head is there.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        command = [sys.executable, "-c", _AUTOSCALER_PROGRAM, RAYCLUSTER, self.namespace]
        command.append(self.address)
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


def _hold(spec: Json) -> None:
    """Its workers' pods go when their raylets have ended, and not before."""
    for group in spec["workerGroupSpecs"]:
        metadata = group["template"].setdefault("metadata", {})
        metadata.setdefault("annotations", {})[HELD] = "until its raylet has ended"


class _SlowStartError(Exception):
    """Ray did not see its own head in time."""


def _head_cluster(options: dict[str, object]) -> Cluster:
    try:
        return Cluster(initialize_head=True, shutdown_at_exit=False, head_node_args=options)
    except Exception as error:
        if "timed out during startup" in str(error):  # Ray's only word for it
            raise _SlowStartError(str(error)) from None
        raise


def _head_node_args(pod_name: str) -> dict[str, object]:
    return {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        # The autoscaler runs beside it, as in a head pod.
        "no_monitor": True,
        "env_vars": {"RAY_CLOUD_INSTANCE_ID": pod_name, "RAY_NODE_TYPE_NAME": "headgroup"},
        "_system_config": {
            "enable_autoscaler_v2": True,
            # On a machine that is busy with other tests a raylet may not answer for 15 s, Ray's
            # own patience; a host that dies by that is not the one that a test has killed.
            "health_check_failure_threshold": 10,
        },
    }


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
