"""The emulation without threads and without Ray: operator and cloud move when they are told to.

Everything else moves by itself: admission, garbage collection, endpoints and quotas are the control
plane's, the scheduler places pods, and KWOK runs them. `settle` waits for all of it.
"""

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from control_plane.api import Api, Json, wait
from control_plane.kubelet import HELD
from control_plane.proxy import Proxy
from control_plane.server import ControlPlane

from autoscaling.provisioning.kubernetes import KubernetesAccess
from autoscaling.provisioning.raycluster import CLUSTER_LABEL, GROUP_LABEL, REPLICA_INDEX_LABEL

from .accounts import head_rules, make_account
from .cloud import Cloud, CloudThread, Loss
from .dashboard import ToldDashboard
from .namespaces import own_namespace
from .objects import HEAD_ACCOUNT, RAYCLUSTER, RAYSERVICE
from .operator import Operator, OperatorThread
from .ray_pods import VERSION, owner
from .spec_hash import annotations

_POLL_S = 0.03
_SETTLED_WITHIN_S = 120.0


class NamespaceByHand:
    """What stands in a namespace, and the three who act on it. `api` is an administrator's."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.dashboard = ToldDashboard()
        self.cloud = Cloud(api, namespace)
        self._num_starts = 0
        self.start_operator()

    def start_operator(self) -> None:
        """An operator that has just been started, instead of the one that there was."""
        self._num_starts += 1
        dice = random.Random(self._num_starts)
        self.operator = Operator(self.api, self.namespace, self.dashboard, dice)

    def settle(self, now_s: float = 0.0, *, is_done: Callable[[], bool] = lambda: True) -> None:
        """Everybody does what is due at `now_s`, until nothing moves and `is_done`."""
        deadline_s = time.monotonic() + _SETTLED_WITHIN_S
        while (moving := self._step(now_s)) is not None or not is_done():
            assert time.monotonic() < deadline_s, f"it does not settle: {moving}"
            time.sleep(_POLL_S)

    def _step(self, now_s: float) -> str | None:
        """Everybody looks once. What is still on its way; `None` if nothing is."""
        if self.operator.step():
            return "the operator acts"
        if self.cloud.step(now_s):
            return "the cloud acts"
        if (moving := self._moving()) is not None:
            return moving
        # What stands now was not there when the operator looked.
        return "the operator acts" if self.operator.step() else self._moving()

    def lose(self, slice_name: str, host: int = 0, how: Loss = Loss.GONE) -> None:
        """Takes a host of a slice. What follows is for `settle`."""
        self.cloud.lose(slice_name, host, how)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Operator and cloud move by themselves meanwhile, in threads: nobody settles anything."""
        with OperatorThread(self.operator), CloudThread(self.cloud):
            yield

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        """Waits for what the control plane does by itself."""
        wait(is_so, what)

    def pods(self, group: str | None = None) -> list[Json]:
        """The pods of Ray, or of one group, those being deleted included."""
        labels = {} if group is None else {GROUP_LABEL: group}
        return _of_ray(self.api.list("Pod", self.namespace, labels))

    def slices(self, group: str) -> dict[str, int]:
        """The slices of a group by name, with how many of their pods run."""
        running: dict[str, int] = {}
        for pod in self.pods(group):
            name = f"{group}-{pod['metadata']['labels'][REPLICA_INDEX_LABEL]}"
            running[name] = running.get(name, 0) + (pod["status"]["phase"] == "Running")
        return dict(sorted(running.items()))

    def _moving(self) -> str | None:
        """What is still on its way; `None` if nothing is."""
        pods = self.api.list("Pod", self.namespace)
        of_ray = _of_ray(pods)
        for pod in of_ray:
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                if not _is_held(pod):
                    return f"{name} is being deleted"
            elif pod["status"].get("phase") != "Running" and not self.cloud.is_waiting(pod, of_ray):
                return f"{name} does not run"
        return self._outdated_service(pods)

    def _outdated_service(self, pods: list[Json]) -> str | None:
        endpoints = self.api.list("EndpointSlice", self.namespace)
        for service in self.api.list("Service", self.namespace):
            name = service["metadata"]["name"]
            selected = {
                pod["metadata"]["name"]
                for pod in pods
                if _selects(service["spec"].get("selector"), pod) and "podIP" in pod["status"]
            }
            found = {
                each["targetRef"]["name"]: each["conditions"].get("terminating", False)
                for of in endpoints
                if of["metadata"]["labels"].get("kubernetes.io/service-name") == name
                for each in of.get("endpoints") or ()
            }
            going = {each["metadata"]["name"] for each in pods if _is_going(each)}
            wanted = {each: each in going for each in selected}
            if found != wanted:
                return f"the endpoints of {name} are {found}, not {wanted}"
        return None


def _of_ray(pods: list[Json]) -> list[Json]:
    return [pod for pod in pods if CLUSTER_LABEL in pod["metadata"].get("labels", {})]


def _selects(selector: Mapping[str, str] | None, pod: Json) -> bool:
    return bool(selector) and selector.items() <= pod["metadata"].get("labels", {}).items()


def _is_going(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_held(pod: Json) -> bool:
    return HELD in pod["metadata"].get("annotations", {})


class ClusterByHand(NamespaceByHand):
    """One RayCluster in a namespace of its own, with what a sidecar of its head has.

    A context manager. With `service` that RayService made the cluster. `rules` are what the head's
    account may do. Requests of the sidecar pass `proxy`; `page_size` bounds what one answer lists.
    """

    def __init__(
        self,
        plane: ControlPlane,
        cluster: Json,
        folder: Path,
        *,
        service: Json | None = None,
        rules: Sequence[Json] | None = None,
        page_size: int | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._plane = plane
        self._cluster, self._service = cluster, service
        self._rules = head_rules() if rules is None else rules
        self.token_file = folder / "token"
        self.proxy = Proxy(plane, page_size)

    def __enter__(self) -> "ClusterByHand":
        with contextlib.ExitStack() as stack:
            namespace = stack.enter_context(own_namespace(self._plane.api))
            super().__init__(self._plane.api, namespace)
            make_account(self.api, namespace, HEAD_ACCOUNT, self._rules)
            install(self.api, namespace, self._cluster, self._service)
            stack.enter_context(self.proxy)
            self.new_token()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def access(self) -> KubernetesAccess:
        """How a sidecar of the head pod speaks with the API."""
        return KubernetesAccess(self.proxy.url, self.namespace, self.token_file, self.proxy.ca_file)

    def new_token(self) -> None:
        """Puts another token of the head's account into the sidecar's file."""
        token = self.api.request_token(self.namespace, HEAD_ACCOUNT)
        self.proxy.know(HEAD_ACCOUNT, token)
        self.token_file.write_text(f"{token}\n")

    def raycluster(self) -> Json:
        """The RayCluster as it is stored."""
        return self.api.get("RayCluster", self.namespace, RAYCLUSTER)

    def rayservice(self) -> Json:
        """The RayService as it is stored."""
        return self.api.get("RayService", self.namespace, RAYSERVICE)

    @contextlib.contextmanager
    def edit(self) -> Iterator[Json]:
        """The RayCluster for changing in place, as a user's editor does."""
        found = self.raycluster()
        yield found
        self.api.replace(found)

    def group(self, name: str) -> Json:
        """A worker group of the RayCluster as it is stored."""
        found: Json = next(
            each
            for each in self.raycluster()["spec"]["workerGroupSpecs"]
            if each["groupName"] == name
        )
        return found


def install(api: Api, namespace: str, cluster: Json, service: Json | None) -> None:
    """Creates a RayCluster; with `service` also the RayService that has made it."""
    body = copy.deepcopy(cluster)
    body["metadata"]["namespace"] = namespace
    if service is not None:
        made = api.create(_in(namespace, service))
        body["metadata"]["ownerReferences"] = [owner(made)]
        body["metadata"]["annotations"] = annotations(made["spec"]["rayClusterConfig"], VERSION)
        api.replace(made | {"status": service["status"]}, "status")
    api.create(body)


def _in(namespace: str, body: Json) -> Json:
    """An object in a namespace, without its status."""
    found = {name: value for name, value in body.items() if name != "status"}
    return found | {"metadata": body["metadata"] | {"namespace": namespace}}


Snapshot = dict[str, list[dict[str, Any]]]
_SHOWN = {
    "pods": "Pod",
    "services": "Service",
    "endpointslices": "EndpointSlice",
    "rayclusters": "RayCluster",
    "rayservices": "RayService",
    "roles": "Role",
    "rolebindings": "RoleBinding",
    "serviceaccounts": "ServiceAccount",
    "events": "Event",
}


def snapshot(api: Api, namespace: str) -> Snapshot:
    """A namespace at this moment, by kind, as the recordings have it."""
    return {plural: api.list(kind, namespace) for plural, kind in _SHOWN.items()}
