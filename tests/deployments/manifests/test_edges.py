"""The way in and what Prometheus reads: fields, and names that alerts and dashboards go by."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.validation.documents import Folder, KubernetesManifest
from deployments.validation.schemas import SchemaFileError, Schemas, read_schemas
from serving.domain.topology import slice_shape

from .examples import ROOT, as_folder, found, in_memory, one, raw_values, rendered, shipped

EDGE_CRDS = Path(__file__).with_name("edge_crds.yaml")
RULES = ROOT / "deployments" / "prometheus" / "rules"
KINDS = ("Gateway", "HTTPRoute", "HealthCheckPolicy", "GCPBackendPolicy", "PodMonitor")

Json = dict[str, Any]


@pytest.fixture(scope="module")
def edge_crds() -> Schemas:
    return read_schemas([EDGE_CRDS])


def test_every_place_of_schemas_has_some(tmp_path: Path) -> None:
    for places in ([tmp_path], [EDGE_CRDS, tmp_path]):
        with pytest.raises(SchemaFileError, match=f"{tmp_path}: no CustomResourceDefinition in it"):
            read_schemas(places)


@pytest.fixture(scope="module")
def folder() -> Folder:
    return in_memory(raw_values((slice_shape("v6e", "4x4"), "spot"), hostname="llm.example.com"))


def test_schemas_take_every_edge(folder: Folder, edge_crds: Schemas) -> None:
    held = folder.of_kind(*KINDS)
    assert [str(problem) for each in held for problem in edge_crds.problems(each)] == []
    # Gateway and route of the RayService and of the RayCluster.
    counts = {kind: len(folder.of_kind(kind)) for kind in KINDS}
    assert list(counts.values()) == [2, 2, 2, 2, 4]


BROKEN: dict[str, tuple[str, Callable[[Json], object], str]] = {
    "listener without a protocol": (
        "Gateway",
        lambda spec: spec["listeners"][0].pop("protocol"),
        "spec.listeners.0: 'protocol' is a required property",
    ),
    "port": (
        "HTTPRoute",
        lambda spec: spec["rules"][0]["backendRefs"][0].update(port="serve"),
        "spec.rules.0.backendRefs.0.port: 'serve' is not of type 'integer'",
    ),
    "duration": (
        "HTTPRoute",
        lambda spec: spec["rules"][0]["timeouts"].update(request="an hour"),
        "spec.rules.0.timeouts.request: 'an hour' does not match",
    ),
    "unknown field": (
        "PodMonitor",
        lambda spec: spec["podMetricsEndpoints"][0].update(intervall="5s"),
        "'intervall' was unexpected",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_schemas_refuse_a_changed_edge(case: str, folder: Folder, edge_crds: Schemas) -> None:
    kind, change, words = BROKEN[case]
    first = folder.of_kind(kind)[0]
    body = copy.deepcopy(first.body)
    change(body["spec"])
    problems = [str(each) for each in edge_crds.problems(KubernetesManifest(first.file, body))]
    assert any(words in each for each in problems), problems


def test_load_balancers_of_others_get_no_policies_of_googles() -> None:
    raw = raw_values((slice_shape("v6e", "4x4"), "spot"), gateway_class="istio")
    other = in_memory(raw)
    assert other.of_kind("HealthCheckPolicy", "GCPBackendPolicy") == []
    assert found(other) == []


def test_every_job_that_alerts_ask_for_is_a_monitor(folder: Folder) -> None:
    asked = {
        job
        for path in RULES.glob("*.yml")
        for job in re.findall(r'job="([^"]+)"', path.read_text())
    }
    jobs = {
        relabeling["replacement"]
        for each in folder.of_kind("PodMonitor")
        for endpoint in each.body["spec"]["podMetricsEndpoints"]
        for relabeling in endpoint["relabelings"]
        if relabeling.get("targetLabel") == "job"
    }
    assert asked
    assert asked <= jobs


def test_each_gateway_is_asked_at_ports_of_its_own_that_its_pod_declares() -> None:
    folder = in_memory(shipped("example.yaml"))
    monitor = one(folder, "PodMonitor", "llm-gateway").body["spec"]
    spec = one(folder, "RayCluster").body["spec"]
    asked = [
        each["template"]
        for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
        if monitor["selector"]["matchLabels"].items()
        <= each["template"]["metadata"]["labels"].items()
    ]
    (template,) = asked
    declared = {
        port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]
    }
    ports = [declared[each["port"]] for each in monitor["podMetricsEndpoints"]]
    assert ports == [9460, 9461, 9462, 9463]
    assert all(
        each["authorization"]["credentials"]["key"] == "metrics-key"
        for each in monitor["podMetricsEndpoints"]
    )
    policy = one(folder, "NetworkPolicy", "llm-pods").body["spec"]
    opened = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
    assert opened >= {*ports, 9451}


def test_gateways_without_such_ports_are_asked_through_one_proxy_alone(folder: Folder) -> None:
    monitor = one(folder, "PodMonitor", "llm-gateway").body["spec"]
    spec = one(folder, "RayCluster").body["spec"]
    templates = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    wanted = monitor["selector"]["matchLabels"].items()
    (asked,) = [
        each for each in templates if wanted <= each["template"]["metadata"]["labels"].items()
    ]
    assert asked is spec["headGroupSpec"]
    ports = {
        port["name"]: port["containerPort"]
        for port in asked["template"]["spec"]["containers"][0]["ports"]
    }
    assert ports[monitor["podMetricsEndpoints"][0]["port"]] == 8000


@pytest.mark.parametrize(("name", "is_refused"), [("grafana", False), ("llm", True)])
def test_overlay_may_have_routes_of_its_own_to_what_is_not_rays(
    name: str, *, is_refused: bool
) -> None:
    files = rendered(shipped("example.yaml"))
    labels = {"app": "grafana"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": []}}
    added: list[dict[str, object]] = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "grafana"},
            "spec": {"selector": {"matchLabels": labels}, "template": pod},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "grafana"},
            "spec": {"selector": labels},
        },
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": name, "namespace": "elsewhere"},
            "spec": {"rules": [{"backendRefs": [{"name": "grafana", "port": 80}]}]},
        },
    ]
    files["overlay.yaml"] = yaml.safe_dump_all(added)
    problems = [each for each in found(as_folder(files)) if "no gateways" in each]
    assert bool(problems) == is_refused, problems
