"""What a Kubernetes cluster lacks for our manifests: the operator, the webhook, schemas."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.applied import RunningCluster
from deployments.doctor.findings import Finding, Level, Unknown
from deployments.doctor.kubernetes import (
    KubernetesFacts,
    check_kubernetes,
    crd_names,
    needs_of,
    tpu_pod_labels,
)
from deployments.doctor.operators import (
    Needs,
    check_operator,
    check_webhook_version,
    find_operator,
)
from deployments.doctor.tpu_webhook import check_tpu_webhook, takes
from serving.domain.topology import slice_shape
from tests.autoscaling.applied_again import applied_again, applied_once
from tests.deployments.manifests.examples import in_memory, raw_values, shipped_folder

Json = dict[str, Any]
DATA = Path(__file__).parents[2] / "data" / "kuberay"
NEEDS = Needs(has_multi_host=True, has_single_host=True, is_incremental=False)
SINGLE = Needs(has_multi_host=False, has_single_host=True, is_incremental=False)
NAMESPACE = {"kubernetes.io/metadata.name": "serving"}
# A TPU pod of ours, as KubeRay labels it, and as it was labelled when the webhook saw none.
POD = {"app.kubernetes.io/name": "kuberay", "ray.io/group": "v6e-2x2-spot"}
POD_OF_OLD = POD | {"app.kubernetes.io/name": "slicewise"}


def deployment(image: str, *args: str, command: tuple[str, ...] = ()) -> Json:
    container = {"name": "main", "image": image, "args": list(args), "command": list(command)}
    return {
        "metadata": {"name": "operator", "namespace": "ray-system"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def webhook() -> Json:
    """The configuration that was in force when KubeRay and the webhook were recorded."""
    documents = yaml.safe_load_all((DATA / "webhook-configuration.yaml").read_text())
    (found,) = (one for one in documents if one["kind"] == "MutatingWebhookConfiguration")
    configuration: Json = found
    return configuration


def told(findings: list[Finding]) -> list[tuple[Level, str]]:
    return [(finding.level, finding.what) for finding in findings]


def operator_told(image: str, *args: str, needs: Needs = NEEDS) -> list[tuple[Level, str]]:
    return told(list(check_operator(find_operator([deployment(image, *args)], []), needs)))


@pytest.mark.parametrize(
    ("image", "args", "levels"),
    [
        ("quay.io/kuberay/operator:v1.7.0", (), [Level.OK, Level.OK]),
        ("registry/kuberay-operator:1.6.2", (), [Level.OK, Level.OK]),
        ("quay.io/kuberay/operator:v1.8.1", (), [Level.NOTE, Level.OK]),
        ("quay.io/kuberay/operator:v1.5.0", (), [Level.OK, Level.ERROR]),
        (
            "quay.io/kuberay/operator:v1.5.1",
            ("--feature-gates=X=false,RayMultiHostIndexing=true",),
            [Level.OK, Level.OK],
        ),
        (
            "quay.io/kuberay/operator:v1.7.0",
            ("--feature-gates", "RayMultiHostIndexing=false"),
            [Level.OK, Level.ERROR],
        ),
        ("quay.io/kuberay/operator:v1.4.2", (), [Level.ERROR]),
        ("quay.io/kuberay/operator@sha256:00", (), [Level.WARNING, Level.NOTE]),
    ],
)
def test_operators_version_and_gates_are_read_from_its_deployment(
    image: str, args: tuple[str, ...], levels: list[Level]
) -> None:
    assert [level for level, _ in operator_told(image, *args)] == levels


def test_missing_index_is_worse_for_slices_of_several_hosts() -> None:
    off = ("quay.io/kuberay/operator:v1.7.0", "--feature-gates=RayMultiHostIndexing=false")
    assert operator_told(*off)[-1][0] == Level.ERROR
    assert operator_told(*off, needs=SINGLE)[-1][0] == Level.WARNING


def test_incremental_upgrades_need_their_gate() -> None:
    needs = Needs(has_multi_host=False, has_single_host=True, is_incremental=True)
    name = "feature gate RayServiceIncrementalUpgrade"
    assert (Level.ERROR, name) in operator_told("quay.io/kuberay/operator:v1.6.2", needs=needs)
    assert name not in dict(map(reversed, operator_told("kuberay/operator:v1.7.0", needs=needs)))


def test_operator_that_nobody_may_see_is_known_by_a_cluster_that_it_made() -> None:
    found = find_operator([deployment("nginx:1.2.3")], [applied_once().cluster])
    assert found is not None
    assert (found.version, found.source) == (
        (1, 7, 0),
        "RayCluster llm-v4944: made by v1.7.0",
    )
    assert find_operator([], []) is None
    assert told(list(check_operator(None, NEEDS))) == [(Level.WARNING, "KubeRay operator")]


@pytest.mark.parametrize(
    ("image", "needs", "level"),
    [
        ("registry/kuberay-tpu-webhook:v1.3.5-gke.1", NEEDS, Level.OK),
        ("registry/tpu-webhook:v1.3.0", NEEDS, Level.ERROR),
        ("registry/tpu-webhook:v1.3.0", SINGLE, Level.OK),
        ("registry/tpu-webhook:v1.2.9", SINGLE, Level.WARNING),
        ("registry/tpu-webhook@sha256:00", NEEDS, Level.NOTE),
        ("nginx:1.0.0", NEEDS, Level.NOTE),
    ],
)
def test_webhooks_version_decides_whose_indices_it_goes_by(
    image: str, needs: Needs, level: Level
) -> None:
    (finding,) = check_webhook_version([deployment(image)], needs)
    assert finding.level == level


def webhook_told(configuration: Json | None, pod: dict[str, str] = POD) -> list[Finding]:
    found = [] if configuration is None else [configuration]
    return list(check_tpu_webhook(found, {"v6e": pod}, NAMESPACE, has_multi_host=True))


def test_recorded_webhook_is_asked_about_our_pods() -> None:
    (finding,) = webhook_told(webhook())
    assert finding.level == Level.OK


def test_webhook_that_does_not_see_our_pods_is_an_error() -> None:
    (finding,) = webhook_told(webhook(), POD_OF_OLD)
    assert finding.level == Level.ERROR
    assert "leaves out the pods of v6e" in finding.found
    assert "app.kubernetes.io/name" in finding.fix


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rules": [{"operations": ["UPDATE"]}]}, "no rule for the creation of pods"),
        (
            {"namespaceSelector": {"matchLabels": {"team": "a"}}},
            "namespaceSelector leaves our namespace out",
        ),
    ],
)
def test_webhook_that_is_not_asked_says_why(changed: Json, words: str) -> None:
    configuration = webhook()
    configuration["webhooks"][0] |= changed
    (finding,) = webhook_told(configuration)
    assert finding.level == Level.ERROR
    assert words in finding.found


def test_webhook_that_may_be_passed_by_is_a_warning() -> None:
    configuration = webhook()
    configuration["webhooks"][0]["failurePolicy"] = "Ignore"
    assert [finding.level for finding in webhook_told(configuration)] == [Level.OK, Level.WARNING]


def test_no_webhook_is_an_error_for_slices_of_several_hosts() -> None:
    other = webhook()
    other["metadata"]["name"] = other["webhooks"][0]["name"] = "istio"
    for configuration in (None, other):
        assert [finding.level for finding in webhook_told(configuration)] == [Level.ERROR]


@pytest.mark.parametrize(
    ("expression", "is_taken"),
    [
        ({"key": "a", "operator": "In", "values": ["1", "2"]}, True),
        ({"key": "a", "operator": "NotIn", "values": ["1"]}, False),
        ({"key": "b", "operator": "NotIn", "values": ["1"]}, True),
        ({"key": "a", "operator": "Exists"}, True),
        ({"key": "a", "operator": "DoesNotExist"}, False),
    ],
)
def test_selectors_are_read_as_kubernetes_does(expression: Json, *, is_taken: bool) -> None:
    assert takes({"matchExpressions": [expression]}, {"a": "1"}) == is_taken


def test_manifests_say_what_they_need() -> None:
    folder = in_memory(
        raw_values((slice_shape("v6e", "4x4"), "spot"), upgrade={"kind": "incremental"})
    )
    assert needs_of(folder) == Needs(
        has_multi_host=True, has_single_host=False, is_incremental=True
    )
    assert set(tpu_pod_labels(folder)) == {"v6e-4x4-spot"}
    assert crd_names(shipped_folder("example.yaml")) >= {
        "rayservices.ray.io",
        "computeclasses.cloud.google.com",
        "gcpbackendpolicies.networking.gke.io",
        "gateways.gateway.networking.k8s.io",
    }


def facts(running: RunningCluster | Unknown) -> KubernetesFacts:
    return KubernetesFacts(
        [deployment("quay.io/kuberay/operator:v1.7.0")],
        [webhook()],
        {"rayservices.ray.io": None},
        NAMESPACE,
        running if isinstance(running, Unknown) else {"RayService": running},
    )


def found_of(running: RunningCluster | Unknown, what: str) -> list[Finding]:
    findings = check_kubernetes(shipped_folder("example.yaml"), facts(running))
    return [finding for finding in findings if finding.what == what]


def test_what_was_applied_and_has_not_come_over_is_shown() -> None:
    applied = applied_again()
    running = RunningCluster(applied.service, applied.cluster, tuple(applied.pods))
    findings = found_of(running, "RayService and what runs of it")
    assert {finding.level for finding in findings} == {Level.WARNING}
    assert "v6e-2x2-spot: maxReplicas: 4 to 6: not carried over yet" in {
        finding.found for finding in findings
    }


def test_cluster_that_has_all_is_ok_and_a_missing_crd_is_not() -> None:
    applied = applied_once()
    running = RunningCluster(applied.service, applied.cluster, tuple(applied.pods))
    (finding,) = found_of(running, "RayService and what runs of it")
    assert finding.level == Level.OK
    (finding,) = found_of(running, "CRD rayservices.ray.io")
    assert finding.level == Level.ERROR


def test_what_may_not_be_read_is_a_warning_with_the_reason() -> None:
    (finding,) = found_of(Unknown("forbidden"), "running cluster")
    assert (finding.level, finding.found) == (Level.WARNING, "not read: forbidden")


def test_pods_of_an_older_template_are_counted() -> None:
    applied = applied_once()
    for spec in (applied.wanted, applied.cluster["spec"]):
        group = copy.deepcopy(spec["workerGroupSpecs"][3])
        group["template"]["metadata"]["annotations"]["slicewise.io/template-hash"] = "abc"
        spec["workerGroupSpecs"][3] = group
    running = RunningCluster(applied.service, applied.cluster, tuple(applied.pods))
    (finding,) = found_of(running, "RayService and what runs of it")
    assert finding.found.startswith("v6e-2x2-spot: 3 pods are of an older template: ")
