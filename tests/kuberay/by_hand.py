"""The emulation without threads and without Ray: operator and cloud move when they are told to."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from autoscaling.provisioning.kubernetes import KubernetesAccess

from .api_server import HEAD_POD_GRANTS, MIRROR_GRANTS, NAMESPACE, ApiServer
from .cloud import Cloud, NoHosts
from .objects import RAYCLUSTER, head_pod
from .operator import Operator
from .schema import CrdSchema
from .store import Json, Store

TOKEN = "token-of-the-head-pod"
USER = "system:serviceaccount:serving:llm-tpu-head"


class ClusterByHand:
    """One RayCluster behind a real API server. A context manager."""

    def __init__(
        self,
        cluster: Json,
        folder: Path,
        *,
        service: Json | None = None,
        schemas: Mapping[str, CrdSchema] | None = None,
        grants: Iterable[tuple[str, str]] = HEAD_POD_GRANTS | MIRROR_GRANTS,
        page_size: int | None = None,
    ) -> None:
        self.store = Store(schemas or {})
        self.store.create("rayclusters", cluster)
        self.store.create("pods", head_pod())
        if service is not None:
            self.store.create("rayservices", service)
        self.api = ApiServer(self.store, folder, page_size)
        self.api.grant(USER, grants, TOKEN)
        self.hosts = NoHosts()
        self.cloud = Cloud(self.store, self.hosts, {})
        self.operator = Operator(self.store, random.Random(0))
        self._token_file = folder / "token"
        self._token_file.write_text(f"{TOKEN}\n")

    def __enter__(self) -> "ClusterByHand":
        self.api.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.api.__exit__(*exception)

    @property
    def access(self) -> KubernetesAccess:
        """How a sidecar of the head pod speaks with the API."""
        return KubernetesAccess(self.api.url, NAMESPACE, self._token_file, self.api.ca_file)

    def settle(self, now_s: float = 0.0) -> None:
        """Operator and cloud do everything that is due at `now_s`."""
        version = ""
        while version != self.store.version:
            version = self.store.version
            self.operator.step()
            self.cloud.step(now_s)

    def group(self, name: str) -> Json:
        """A worker group of the RayCluster as it is stored."""
        spec = self.store.get("rayclusters", RAYCLUSTER)["spec"]
        found: Json = next(each for each in spec["workerGroupSpecs"] if each["groupName"] == name)
        return found

    def pods(self, group: str) -> list[Json]:
        """A group's pods, those being deleted included."""
        return self.store.list("pods", {"ray.io/group": group})

    def slices(self, group: str) -> dict[str, int]:
        """The slices of a group by name, with how many of their pods run."""
        running: dict[str, int] = {}
        for pod in self.pods(group):
            name = f"{group}-{pod['metadata']['labels']['ray.io/worker-group-replica-index']}"
            running[name] = running.get(name, 0) + (pod["status"]["phase"] == "Running")
        return dict(sorted(running.items()))
