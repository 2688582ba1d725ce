"""What is read of a cluster through kubectl, from a program that answers as the real one does."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kuberay.objects import raycluster

from deployments.kubectl import Kubectl, KubectlError
from deployments.status.cluster.reading import read_cluster_of
from serving.domain.supply.pods import PodPhase
from tests.deployments.status.staged import GROUP, NOW_S, Scene, control_pod, instant

Json = dict[str, Any]
FORBIDDEN = 'Error from server (Forbidden): nodes is forbidden: User "jane" cannot list nodes'


def listed(*items: Json) -> Json:
    return {"kind": "List", "items": list(items)}


def suspended() -> Json:
    """A ComputeClass of which GKE has suspended one rule of two."""
    condition = {
        "type": "ProvisioningSuspended",
        "status": "True",
        "reason": "OutOfResources",
        "message": "none is left",
        "lastTransitionTime": instant(60),
    }
    rules = [{"conditions": [condition]}, {"conditions": []}]
    return {"metadata": {"name": GROUP}, "status": {"priorityStatuses": rules}}


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Json | str]:
    """What kubectl says of each kind: an object, or words of a refusal. One slice, all well."""
    scene = Scene()
    one = scene.add()
    cluster = raycluster(scene.group | {"replicas": 1})
    of_ray = [*scene.control, *one.pods]
    machine = {
        "metadata": {"name": "machine-0-0"},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    warning = {"reason": "FailedToCreateWorkerPod", "message": "no", "eventTime": instant(30)}
    older = warning | {"message": "older", "eventTime": instant(90)}
    quota = {
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "9"}},
        "status": {"used": {"pods": "5"}},
    }
    said: dict[str, Json | str] = {
        "rayclusters.ray.io": cluster,
        "pods --namespace=serving --selector=ray.io/cluster": listed(*of_ray),
        "pods --namespace=serving --selector=app.kubernetes.io/name": listed(
            control_pod("redis-0", {"app.kubernetes.io/name": "slicewise-redis"})
        ),
        "resourcequotas": listed(quota),
        "computeclasses": listed(suspended(), suspended() | {"metadata": {"name": "theirs"}}),
        "nodes": listed(machine),
        "events": listed(older, warning),
    }
    monkeypatch.setenv("PATH", f"{tmp_path}", prepend=":")
    return said


def speak(folder: Path, answers: Mapping[str, Json | str]) -> None:
    """Makes kubectl say so."""
    cases = []
    for number, (asked, answer) in enumerate(answers.items()):
        file = folder / f"answer-{number}"
        file.write_text(answer if isinstance(answer, str) else json.dumps(answer))
        way = f"cat {file}" if not isinstance(answer, str) else f"cat {file} >&2; exit 1"
        cases.append(f'*" get {asked}"*) {way};;')
    program = folder / "kubectl"
    program.write_text('#!/bin/sh\ncase " $*" in\n' + "\n".join(cases) + "\nesac\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_cluster_is_read_with_what_stands_around_it(
    answers: dict[str, Json | str], tmp_path: Path
) -> None:
    speak(tmp_path, answers)
    found, running = read_cluster_of(Kubectl(), "RayCluster", "llm", "serving")
    assert running.cluster is not None
    assert (found.target, found.name, found.problems) == (
        "RayCluster serving/llm",
        "llm-tpu-raycluster",
        {},
    )
    components = [pod.component for pod in found.pods if pod.place is None]
    assert components == ["head", "gateway", "gateway", "redis"]
    places = [pod.place for pod in found.pods if pod.place is not None]
    assert [(each.group, each.slice_name, each.worker_id) for each in places] == [
        (GROUP, f"{GROUP}-0", 0),
        (GROUP, f"{GROUP}-0", 1),
    ]
    assert all((pod.is_ready, pod.phase) == (True, PodPhase.RUNNING) for pod in found.pods)
    assert [(each.name, each.asked_for, each.num_hosts) for each in found.groups] == [(GROUP, 1, 2)]
    assert found.quotas is not None
    assert [(each.quota, each.used, each.hard) for each in found.quotas] == [("few", 5.0, 9.0)]
    assert found.classes is not None
    (compute_class,) = found.classes
    (rule,) = compute_class.suspended
    assert (compute_class.num_rules, rule.reason) == (2, "OutOfResources: none is left")
    assert rule.since_s == NOW_S - 60
    assert found.machines == {"machine-0-0": True}
    assert found.warnings is not None
    assert [each.message for each in found.warnings] == ["no", "older"]


def test_part_that_is_refused_is_unknown_and_the_others_are_read(
    answers: dict[str, Json | str], tmp_path: Path
) -> None:
    speak(tmp_path, answers | {"nodes": FORBIDDEN})
    found, _ = read_cluster_of(Kubectl(), "RayCluster", "llm", "serving")
    assert found.machines is None
    assert list(found.problems) == ["nodes"]
    assert 'User "jane" cannot list nodes' in found.problems["nodes"]
    assert found.quotas is not None


def test_cluster_that_is_not_there_is_no_error(
    answers: dict[str, Json | str], tmp_path: Path
) -> None:
    missing = 'Error from server (NotFound): rayclusters.ray.io "llm" not found'
    speak(tmp_path, answers | {"rayclusters.ray.io": missing})
    found, _ = read_cluster_of(Kubectl(), "RayCluster", "llm", "serving")
    assert (found.name, found.pods) == (None, ())


def test_pod_that_kuberay_did_not_make_is_an_error_with_its_reason(
    answers: dict[str, Json | str], tmp_path: Path
) -> None:
    stranger = {"metadata": {"name": "x", "labels": {"ray.io/node-type": "worker"}}}
    pods = {"pods --namespace=serving --selector=ray.io/cluster": listed(stranger)}
    speak(tmp_path, answers | pods)
    with pytest.raises(KubectlError, match="RayCluster serving/llm: not a pod as KubeRay"):
        read_cluster_of(Kubectl(), "RayCluster", "llm", "serving")
