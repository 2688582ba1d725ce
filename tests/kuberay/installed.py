"""What `slicewise render` writes, as an emulated cluster can run it: RayService and all around it.

The RayService is the rendered one. Changed is what a machine without chips and images demands, and
nothing else (`as_run_here`): engines are paced ones of the shipped model's tokenizer, whoever asked
for CPUs gets a hundredth, one gateway instead of several, one HTTP proxy, on the head and a free
port; keys and link secret are files of the test. Gateways' pods are marked as probed.
"""

import copy
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from control_plane.kubelet import PROBED

from deployments.manifests.names import GATEWAY_GROUP
from deployments.manifests.render import manifests
from deployments.manifests.values import parse_values
from serving.domain.names.gke_names import GKE_CHIPS

from .objects import RAYCLUSTER, RAYSERVICE

Json = dict[str, Any]

_DEMO_MODEL = Path(__file__).parents[2] / "models" / "slicewise-demo"
_CPUS = 0.01
# What is there before a RayService is applied, and what the API server here knows of.
_AROUND = ("ServiceAccount", "PriorityClass", "Service", "ResourceQuota")


@dataclass(frozen=True)
class Installed:
    """The RayService of a values file, the RayCluster that KubeRay makes of it, and the rest."""

    service: Json
    around: list[Json]

    @property
    def cluster(self) -> Json:
        """The RayCluster."""
        spec = copy.deepcopy(self.service["spec"]["rayClusterConfig"])
        for group in spec["workerGroupSpecs"]:
            # Go writes the empty struct, and Ray's provider counts on it.
            group["scaleStrategy"] = {}
        metadata = {"name": RAYCLUSTER, "namespace": self.service["metadata"]["namespace"]}
        return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}

    @property
    def slice_groups(self) -> list[str]:
        """The worker groups that make slices."""
        return [
            group["groupName"]
            for group in self.cluster["spec"]["workerGroupSpecs"]
            if GKE_CHIPS in group["template"]["spec"]["containers"][0]["resources"]["limits"]
        ]


@dataclass(frozen=True)
class Place:
    """Where the application is run: its HTTP port, the pace of its engines, a folder for files."""

    port: int
    pace: Mapping[str, float]
    folder: Path

    @property
    def keys_file(self) -> Path:
        """The API keys."""
        return self.folder / "api-keys"

    @property
    def api_key(self) -> str:
        """One of them."""
        return self.keys_file.read_text().strip()


def installed(raw: Json, place: Place) -> Installed:
    """Renders a values file under the name that the emulation has; its service is pending."""
    raw = copy.deepcopy(raw)
    raw["cluster"]["name"] = RAYSERVICE
    bodies = [
        copy.deepcopy(body) for of in manifests(parse_values(raw, None)).values() for body in of
    ]
    (service,) = [body for body in bodies if body["kind"] == "RayService"]
    spec = service["spec"]
    spec["serveConfigV2"] = as_run_here(spec["serveConfigV2"], place)
    for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
        if group["groupName"] == GATEWAY_GROUP:
            annotations = group["template"]["metadata"].setdefault("annotations", {})
            annotations[PROBED] = "by the test"
    # As KubeRay tells of a cluster whose application has not run yet.
    service["status"] = {
        "activeServiceStatus": {},
        "pendingServiceStatus": {"rayClusterName": RAYCLUSTER},
    }
    return Installed(service, [body for body in bodies if body["kind"] in _AROUND])


def as_run_here(serve_config: str, place: Place) -> str:
    """Serve's configuration of a rendered RayService, changed as the module says."""
    config = yaml.safe_load(serve_config)
    config["proxy_location"] = "HeadOnly"
    config["http_options"]["port"] = place.port
    args = config["applications"][0]["args"]
    for model in args["models"]:
        model |= {"source": f"{_DEMO_MODEL}", "engine": "paced", "paced": dict(place.pace)}
        model.pop("engine_args", None)
        for deployment in model["deployments"]:
            deployment["num_cpus"] = _CPUS
    args["gateway"] = args.get("gateway", {}) | {"replicas": 1, "num_cpus": _CPUS}
    place.keys_file.write_text(f"sk-{secrets.token_hex(16)}\n")
    args["auth"] = {"keys_file": f"{place.keys_file}"}
    secret_file = place.folder / "link-secret"
    secret_file.write_text(secrets.token_hex(32))
    args["link"] = args.get("link", {}) | {"secret_file": f"{secret_file}"}
    text: str = yaml.safe_dump(config)
    return text
