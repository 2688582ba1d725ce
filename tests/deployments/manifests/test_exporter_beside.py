"""The TPU exporter in the pods of TPU hosts: who it says it is, and that Prometheus finds it."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kuberay.recordings import FOLDER, Recording, environment, recording
from kuberay.webhook import admitted, told_to

from deployments.validation.documents import Folder, mapping
from deployments.validation.found_pods import FoundPod, all_pods, selects
from serving.domain.topology import slice_shape
from serving.exporters.host_sources import WorkloadCollector, announce_host
from serving.exporters.identity import Identity, read_identity
from serving.telemetry.metric_names import HOST_LABELS

from .examples import (
    ROOT,
    as_folder,
    found,
    in_memory,
    one,
    raw_values,
    rendered,
    shipped,
    shipped_folder,
)

sys.path[:0] = [str(Path(__file__).parents[2] / "exporters")]

from scrapes import FixedCollector, bus, exporter, scrape  # noqa: E402

Json = dict[str, Any]
PROMETHEUS = ROOT / "deployments" / "prometheus"
EXPORTER_PORT = 9450


def pods_of(folder: Folder) -> dict[str, FoundPod]:
    """The pods of the RayService and beside it, by what they are."""
    return {
        str(pod.labels.get("app.kubernetes.io/component")): pod
        for pod in all_pods(folder)
        if pod.manifest.kind != "RayCluster"
    }


def sidecar(spec: Json) -> Json:
    (found_one,) = [each for each in spec["initContainers"] if each["name"] == "tpu-exporter"]
    container: Json = found_one
    return container


def filled_in(container: Json, pod: Json) -> dict[str, str]:
    """A container's variables, as a kubelet fills them in from its pod."""
    values: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            values[each["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match: values[match[1]], each["value"]
            )
            continue
        path = each["valueFrom"]["fieldRef"]["fieldPath"]
        if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            values[each["name"]] = pod["metadata"]["labels"][label[1]]
        else:
            values[each["name"]] = {"status.hostIP": "10.0.0.9", "spec.nodeName": "node-1"}[path]
    return values


def template_of(name: str, group: str) -> Json:
    clusters = shipped_folder(name).of_kind("RayCluster")
    (spec,) = [
        each["template"]["spec"]
        for each in clusters[0].body["spec"]["workerGroupSpecs"]
        if each["groupName"] == group
    ]
    found_spec: Json = spec
    return found_spec


def identities(name: str, values: str) -> list[tuple[Identity, dict[str, str]]]:
    """Who the exporter of each recorded host is, and what the webhook told Ray there."""
    hosts: Recording = recording(name)
    return [
        (
            read_identity(
                filled_in(
                    sidecar(template_of(values, pod["metadata"]["labels"]["ray.io/group"])), pod
                )
            ),
            environment(pod),
        )
        for pod in hosts.hosts()
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [("07-host-of-two-lost", "tpu7x.yaml"), ("10-with-host-index", "example.yaml")],
)
def test_exporter_has_the_slice_and_host_that_the_real_webhook_told_ray(
    name: str, values: str
) -> None:
    found_hosts = identities(name, values)
    assert len(found_hosts) > 2
    for identity, told in found_hosts:
        assert (identity["slice"], identity["worker"]) == (told["TPU_NAME"], told["TPU_WORKER_ID"])
        assert all(identity[label] for label in HOST_LABELS)


def test_webhook_tells_only_containers_with_chips() -> None:
    """Recorded: KubeRay's own container in the pods of TPU hosts was told nothing."""
    recorded = json.loads((FOLDER / "recorded" / "07-multi-host-slices.json").read_text())
    pods = [each["object"]["spec"] for each in recorded["objects"] if each["kind"] == "pods"]
    told = [pod for pod in pods if "TPU_NAME" in json.dumps(pod["containers"])]
    assert len(told) > 4
    for pod in told:
        assert [each["name"] for each in pod["initContainers"]] == ["wait-gcs-ready"]
        assert "TPU_NAME" not in json.dumps(pod["initContainers"])
        assert "TPU_WORKER" not in json.dumps(pod["initContainers"])


def test_sidecar_leaves_the_webhooks_container_first() -> None:
    spec = template_of("tpu7x.yaml", "tpu7x-2x2x2-spot")
    labels = {
        "ray.io/group": "tpu7x-2x2x2-spot",
        "ray.io/cluster": "llm-tpu7x",
        "ray.io/replica-host-index": "1",
        "ray.io/worker-group-replica-index": "0",
    }
    told = admitted({"metadata": {"labels": labels}, "spec": spec}, [])
    assert told_to(told)["TPU_NAME"] == "tpu7x-2x2x2-spot-0"
    assert sidecar(told["spec"]) == sidecar(spec)


# -- Prometheus finds exactly these --


def gke_jobs() -> dict[str, Json]:
    jobs = yaml.safe_load((PROMETHEUS / "gke.yml").read_text())["scrape_configs"]
    return {job["job_name"]: job for job in jobs}


def test_scrape_configuration_selects_the_rendered_hosts_and_their_exporter() -> None:
    folder = shipped_folder("example.yaml")
    pods = pods_of(folder)
    (discovery,) = gke_jobs()["tpu-exporter"]["kubernetes_sd_configs"]
    assert discovery["namespaces"]["names"] == [one(folder, "RayService").namespace]
    (selector,) = discovery["selectors"]
    label, _, value = selector["label"].partition("=")
    chosen = {
        name for name, pod in pods.items() if selects({"matchLabels": {label: value}}, pod.labels)
    }
    assert chosen == {"engine"}
    ports = [
        int(relabeling["replacement"].partition(":")[2])
        for relabeling in gke_jobs()["tpu-exporter"]["relabel_configs"]
        if relabeling.get("target_label") == "__address__"
    ]
    served = [port["containerPort"] for port in sidecar(pods["engine"].spec)["ports"]]
    assert ports == served == [EXPORTER_PORT]


def test_scrape_configuration_selects_rays_pods_gateways_and_the_head() -> None:
    folder = shipped_folder("example.yaml")
    pods = pods_of(folder)
    all_jobs = {
        "ray": {"head", "gateway", "control", "engine"},
        "gateway": {"gateway"},
        "slice-provisioner": {"head"},
    }
    for job, wanted in all_jobs.items():
        (discovery,) = gke_jobs()[job]["kubernetes_sd_configs"]
        assert discovery["namespaces"]["names"] == [one(folder, "RayService").namespace]
        label, _, value = discovery["selectors"][0]["label"].partition("=")
        chosen = {
            name
            for name, pod in pods.items()
            if selects({"matchLabels": {label: value}}, pod.labels)
        }
        assert chosen == wanted


def test_pod_monitors_name_ports_that_their_pods_have_once() -> None:
    folder = shipped_folder("example.yaml")
    for monitor in folder.of_kind("PodMonitor"):
        selector = mapping(monitor.body, "spec", "selector")
        endpoints = monitor.body["spec"]["podMetricsEndpoints"]
        for pod in pods_of(folder).values():
            if not selects(selector, pod.labels):
                continue
            containers = [*pod.spec["containers"], *pod.spec.get("initContainers", ())]
            ports = [port for each in containers for port in each.get("ports", ())]
            names = [port["name"] for port in ports]
            assert [names.count(each["port"]) for each in endpoints] == [1] * len(endpoints)
            assert len({port["containerPort"] for port in ports}) == len(ports)


def test_libtpus_port_is_declared_where_its_runtime_is_and_asked_there() -> None:
    spec = pods_of(shipped_folder("example.yaml"))["engine"].spec
    declared = [port["containerPort"] for port in spec["containers"][0]["ports"]]
    assert 8431 in declared
    assert "--libtpu=127.0.0.1:8431" in sidecar(spec)["args"]


def test_exporter_asks_the_runtime_of_every_engine_that_shares_a_host() -> None:
    raw = raw_values((slice_shape("v6e", "2x4"), "spot"))
    (model,) = raw["applications"][0]["args"]["models"]
    model["deployments"][0]["slice"]["num_engines"] = 8
    specs = one(in_memory(raw), "RayCluster").body["spec"]["workerGroupSpecs"]
    (group,) = [each for each in specs if each["groupName"] == "v6e-2x4-spot"]
    asked = [each for each in sidecar(group["template"]["spec"])["args"] if "libtpu" in each]
    assert asked == [f"--libtpu=127.0.0.1:{port}" for port in range(8431, 8439)]


def test_network_policy_lets_prometheus_in() -> None:
    policy = one(shipped_folder("example.yaml"), "NetworkPolicy", "llm-pods")
    ports = [
        port["port"] for rule in policy.body["spec"]["ingress"] for port in rule.get("ports", ())
    ]
    assert EXPORTER_PORT in ports


# -- what alerts join by is there --


def labels_that_rules_join_by() -> set[str]:
    """The labels in `by` and `on` of every expression over the exporter's series."""
    rules = [
        rule["expr"]
        for path in sorted((PROMETHEUS / "rules").glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "tpu_" in rule["expr"]
    ]
    assert len(rules) > 10
    named = re.findall(r"(?:by|on)\s*\(([^)]*)\)", " ".join(rules))
    return {label.strip() for words in named for label in words.split(",")}


def test_every_label_that_alerts_join_by_comes_out_of_the_rendered_environment(
    tmp_path: Path,
) -> None:
    (pod,) = [each for each in recording("10-with-host-index").hosts() if "reserved" in str(each)]
    spec = template_of("example.yaml", "v6e-2x2-reserved")
    identity = read_identity(filled_in(sidecar(spec), pod))
    held = announce_host(tmp_path, "qwen3-8b", "engine-qwen3-8b-reserved", "r1")
    workloads = WorkloadCollector(tmp_path).collect(1.0)
    source = exporter(
        FixedCollector("pci", bus()),
        FixedCollector("workloads", workloads),
        environment={f"SLICEWISE_{name.upper()}": value for name, value in identity.labels},
    )
    page = scrape(source)
    os.close(held)
    # From Prometheus itself, and of collectors.
    own = {"instance", "job", "collector", "code"}
    # Of the gateways' series, on the other side of a join.
    of_gateways = {"model", "state", "cause", "compute_class"}
    wanted = labels_that_rules_join_by() - own - of_gateways
    assert {"slice", "worker", "node", "accelerator", "topology"} <= wanted
    (info, *_) = page.all("tpu_chip_info")
    shown = dict(info.labels)
    assert {label for label in (*wanted, "compute_class") if not shown.get(label)} == set()


def test_daemon_set_of_an_overlay_that_does_not_select_its_own_pods_is_refused() -> None:
    files = rendered(shipped("example.yaml"))
    pod = {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": []}}
    files["overlay.yaml"] = yaml.safe_dump(
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "mine"},
            "spec": {"selector": {"matchLabels": {"app": "x"}}, "template": pod},
        }
    )
    problems = found(as_folder(files))
    words = 'spec.selector: does not select its own pods (value "app=x"); allowed: app=a'
    assert any(words in each for each in problems), problems
