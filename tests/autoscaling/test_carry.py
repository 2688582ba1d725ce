"""What is carried from a RayService into its cluster, on objects recorded from a real KubeRay."""

import copy
from typing import Any

import pytest

from autoscaling.provisioning.carry.compare import (
    CLUSTER,
    HEAD,
    Carry,
    Effect,
    carry_over,
    outdated_pods,
)
from serving.domain.names.gke_names import TEMPLATE_HASH_ANNOTATION
from tests.autoscaling.applied_again import Applied, applied_again, applied_once

SPOT, RESERVED, FLEX = "v6e-2x2-spot", "v6e-2x2-reserved", "v6e-2x2-flex-start"
APPENDED = "v6e-2x2-spot-b"

Json = dict[str, Any]


def carried(applied: Applied) -> Carry:
    return carry_over(applied.service, applied.cluster, applied.pods)


def told(carry: Carry) -> set[tuple[str, str]]:
    return {(change.subject, str(change.effect)) for change in carry.changes}


def step(carry: Carry, path: str) -> Json:
    (found,) = (step for step in carry.patch if step["path"] == path and step["op"] != "test")
    return found


def template_of(applied: Applied, name: str) -> Json:
    template: Json = applied.group(name)["template"]
    return template


def test_new_cluster_has_all_that_its_rayservice_has() -> None:
    assert carried(applied_once()) == Carry()


def test_counts_are_nobodys_but_the_provisioners() -> None:
    applied = applied_once()
    applied.group(SPOT)["replicas"] = 0
    applied.group(SPOT).pop("scaleStrategy")
    assert applied.group(SPOT, is_live=True)["replicas"] == 3
    assert carried(applied) == Carry()


def test_another_number_of_gateways_comes_over_at_once() -> None:
    applied = applied_once()
    applied.group("gateway").update(minReplicas=5, replicas=5, maxReplicas=5)
    carry = carried(applied)
    assert carry.hindrances == ()
    assert told(carry) == {("gateway", "at once")}
    assert [change.what for change in carry.changes] == [
        "minReplicas: 2 to 5",
        "maxReplicas: 2 to 5",
    ]


def test_what_was_recorded_not_to_come_over_is_carried() -> None:
    applied = applied_again()
    carry = carried(applied)
    assert carry.hindrances == ()
    assert told(carry) == {
        (SPOT, "at once"),
        (SPOT, "in pods made from now on"),
        (RESERVED, "in pods made from now on"),
        (FLEX, "in pods made from now on"),
        (APPENDED, "at once"),
    }
    said = [change.what for change in carry.changes]
    assert "maxReplicas: 4 to 6" in said
    image = "template.spec.containers[ray-worker].image: us-docker.pkg.dev/PROJECT/slicewise/"
    assert sum(text.startswith(image) and "0.1.0 to" in text for text in said) == 3
    assert "the group is new: 0 to 6 slices" in said


def test_patch_holds_only_for_the_cluster_that_was_read() -> None:
    patch = carried(applied_again()).patch
    assert patch[0] == {"op": "test", "path": "/metadata/generation", "value": 2}
    touched = [step["path"].split("/")[3] for step in patch[1:] if step["op"] != "test"]
    tested = [step["path"].split("/")[3] for step in patch[1:] if step["op"] == "test"]
    assert set(touched) - {"-"} == set(tested)
    assert not [step for step in patch if step["path"].endswith(("replicas", "scaleStrategy"))]


def test_carried_template_has_a_hash_of_its_own_and_older_pods_are_told_by_it() -> None:
    applied = applied_again()
    position = 3
    carry = carried(applied)
    template = step(carry, f"/spec/workerGroupSpecs/{position}/template")["value"]
    assert len(template["metadata"]["annotations"][TEMPLATE_HASH_ANNOTATION]) == 16
    before = applied.cluster["spec"]["workerGroupSpecs"][position]
    assert outdated_pods(applied.cluster, applied.pods) == {}
    before["template"] = template
    outdated = outdated_pods(applied.cluster, applied.pods)
    assert {name: len(pods) for name, pods in outdated.items()} == {SPOT: 3}
    # A pod that KubeRay makes from it has the template's annotations.
    new = copy.deepcopy(
        next(pod for pod in applied.pods if pod["metadata"]["name"] in outdated[SPOT])
    )
    new["metadata"]["annotations"] = template["metadata"]["annotations"]
    assert outdated_pods(applied.cluster, [new]) == {}
    # Carried over once, it is the same.
    applied.group(SPOT)["maxReplicas"] = before["maxReplicas"]
    assert (SPOT, "in pods made from now on") not in told(carried(applied))


def test_template_that_goes_back_is_carried_again() -> None:
    applied = applied_again()
    first = carried(applied)
    live = applied.group(SPOT, is_live=True)
    old = copy.deepcopy(live["template"])
    live["template"] = step(first, "/spec/workerGroupSpecs/3/template")["value"]
    applied.group(SPOT)["template"] = old
    assert (SPOT, "in pods made from now on") in told(carried(applied))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("minReplicas", 1, "minReplicas: 0 to 1"),
        ("priority", 5, "priority: 30 to 5"),
        ("idleTimeoutSeconds", 60, "idleTimeoutSeconds: 10000000 to 60"),
    ],
)
def test_bounds_are_carried_at_once(name: str, value: int, words: str) -> None:
    applied = applied_once()
    applied.group(SPOT)[name] = value
    carry = carried(applied)
    assert [(one.subject, one.effect, one.what) for one in carry.changes] == [
        (SPOT, Effect.AT_ONCE, words)
    ]
    assert step(carry, f"/spec/workerGroupSpecs/3/{name}")["value"] == value


def test_labels_of_a_group_count_for_what_its_pods_are_made_from() -> None:
    applied = applied_once()
    applied.group(SPOT)["labels"]["team"] = "a"
    carry = carried(applied)
    assert [(one.effect, one.what) for one in carry.changes] == [
        (Effect.NEW_PODS, "labels.team: nothing to a")
    ]
    template = step(carry, "/spec/workerGroupSpecs/3/template")["value"]
    assert TEMPLATE_HASH_ANNOTATION in template["metadata"]["annotations"]


def test_heads_template_and_autoscaler_wait_for_the_next_head() -> None:
    applied = applied_once()
    head = applied.wanted["headGroupSpec"]["template"]["spec"]["containers"][0]
    head["image"] = "slicewise:2"
    applied.wanted["autoscalerOptions"]["upscalingMode"] = "Conservative"
    assert told(carried(applied)) == {(HEAD, "in pods made from now on")}


def test_group_that_is_gone_stays_while_it_has_slices_and_may_run_empty() -> None:
    applied = applied_once()
    for name in (SPOT, RESERVED):
        applied.wanted["workerGroupSpecs"].remove(applied.group(name))
    carry = carried(applied)
    assert {one.subject for one in carry.hindrances} == {SPOT, RESERVED}
    assert all("replicas may be on" in one.reason for one in carry.hindrances)
    # The reserved group would never run empty above its minimum.
    assert [one.what for one in carry.changes] == [
        "minReplicas: 1 to 0, so that the group can run empty"
    ]


def test_group_that_is_gone_and_empty_is_removed() -> None:
    applied = applied_once()
    applied.wanted["workerGroupSpecs"].remove(applied.group(FLEX))
    applied.wanted["workerGroupSpecs"].remove(applied.group(SPOT))
    applied.group(SPOT, is_live=True)["replicas"] = 0
    applied.pods = [pod for pod in applied.pods if "spot" not in pod["metadata"]["name"]]
    carry = carried(applied)
    assert carry.hindrances == ()
    # From the end: a removal moves what stands behind it.
    removed = [one["path"] for one in carry.patch if one["op"] == "remove"]
    assert removed == ["/spec/workerGroupSpecs/3", "/spec/workerGroupSpecs/1"]


def test_group_with_another_number_of_hosts_keeps_its_template() -> None:
    applied = applied_once()
    applied.group(SPOT)["numOfHosts"] = 2
    template_of(applied, SPOT)["spec"]["containers"][0]["image"] = "slicewise:2"
    carry = carried(applied)
    assert carry.patch == ()
    assert [(one.subject, one.what) for one in carry.hindrances] == [
        (SPOT, "numOfHosts: 1 to 2"),
        (
            SPOT,
            "template.spec.containers[ray-worker].image: "
            "us-docker.pkg.dev/PROJECT/slicewise/slicewise-tpu:0.1.0 to slicewise:2",
        ),
    ]
    assert "another compute class" in carry.hindrances[0].way


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rayVersion", "2.61.0", "Ray refuses nodes of another version"),
        ("gcsFaultToleranceOptions", {"redisAddress": "r:1"}, "the next head would begin with"),
        ("upgradeStrategy", {"type": "Recreate"}, "KubeRay ends every pod"),
        ("enableInTreeAutoscaling", False, "drops surplus slices at random"),
        ("historyServerOptions", {"collector": {"image": "x"}}, "was never tried"),
    ],
)
def test_what_the_cluster_cannot_take_keeps_pods_of_new_templates_away(
    name: str, value: object, reason: str
) -> None:
    applied = applied_again()
    applied.wanted[name] = value
    carry = carried(applied)
    assert (CLUSTER, True) in {(one.subject, reason in one.reason) for one in carry.hindrances}
    # Bounds have nothing to do with it.
    assert told(carry) == {(SPOT, "at once")}
    held_back = {one.subject for one in carry.hindrances if "may go with" in one.reason}
    assert held_back == {SPOT, RESERVED, FLEX, APPENDED}


@pytest.mark.parametrize("strategy", [{"type": "NewCluster"}, {}])
def test_nothing_is_carried_where_kuberay_makes_a_second_cluster(strategy: Json) -> None:
    applied = applied_again()
    applied.service["spec"]["upgradeStrategy"] = strategy
    carry = carried(applied)
    assert (carry.changes, carry.patch) == ((), ())
    assert "KubeRay makes a second cluster" in carry.hindrances[0].reason


def test_nothing_is_carried_while_there_are_two_clusters() -> None:
    applied = applied_again()
    applied.service["status"]["pendingServiceStatus"] = {"rayClusterName": "llm-other"}
    carry = carried(applied)
    assert carry.patch == ()
    assert "llm-other to come" in carry.hindrances[0].reason
