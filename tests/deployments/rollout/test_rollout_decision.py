"""What applying does, decided on objects recorded from a real KubeRay."""

import copy
from typing import Any

import pytest

from deployments.applied import RunningCluster
from deployments.rollout.chips import allowed_chips, chip_need
from deployments.rollout.command import report_lines
from deployments.rollout.decision import Outcome, Rollout, decide_rollout
from tests.autoscaling.applied_again import Applied, applied_again, applied_once

SPOT, FLEX = "v6e-2x2-spot", "v6e-2x2-flex-start"
# Of the recorded installation: four slices of four chips, and the quota that was rendered for it.
NUM_USED, QUOTA = 16, 28

Json = dict[str, Any]


def with_chips(applied: Applied) -> tuple[Json, ...]:
    """The recorded pods, with the chips that their group's template asks for."""
    limits = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["resources"]
        for group in applied.cluster["spec"]["workerGroupSpecs"]
    }
    pods = copy.deepcopy(applied.pods)
    for pod in pods:
        group = pod["metadata"]["labels"]["ray.io/group"]
        pod["spec"]["containers"][0]["resources"] = limits.get(group, {})
    return tuple(pods)


def decided(
    applied: Applied,
    before: Json | None = None,
    num_allowed: int | None = QUOTA,
    other_cluster: str | None = None,
) -> Rollout:
    """Applying the RayService to the cluster; `before` is the one that was applied last."""
    running = RunningCluster(
        before or applied.service, applied.cluster, with_chips(applied), other_cluster
    )
    return decide_rollout(applied.service, running, num_allowed)


def upgrading(applied: Applied, kind: str = "NewCluster") -> Applied:
    applied.service["spec"]["upgradeStrategy"] = {"type": kind}
    return applied


def effects(rollout: Rollout) -> dict[str, str]:
    return {step.subject: step.effect for step in rollout.steps}


def test_applying_what_runs_does_nothing_whatever_the_counts_are() -> None:
    applied = applied_once()
    for group in applied.wanted["workerGroupSpecs"]:
        group["replicas"] = 0
    assert decided(applied) == Rollout(Outcome.NOTHING)


def test_models_alone_are_ray_serves() -> None:
    applied = applied_once()
    before = copy.deepcopy(applied.service)
    config = applied.service["spec"]["serveConfigV2"]
    applied.service["spec"]["serveConfigV2"] = config.replace("name: slicewise", "name: other", 1)
    rollout = decided(applied, before)
    assert rollout.outcome == Outcome.IN_PLACE
    assert effects(rollout) == {"Serve configuration": "in place, by Ray Serve"}


def test_higher_maximum_is_in_place_and_needs_no_pod() -> None:
    applied = applied_once()
    applied.group(SPOT)["maxReplicas"] = 6
    rollout = decided(applied)
    assert rollout.outcome == Outcome.IN_PLACE
    assert effects(rollout) == {SPOT: "at once"}


def test_new_image_rolls_slice_by_slice_and_says_how_many() -> None:
    rollout = decided(applied_again())
    assert rollout.outcome == Outcome.ROLLS
    found = [(step.subject, step.effect) for step in rollout.steps]
    assert (SPOT, "slice by slice: 3 slices, 1 at a time") in found
    assert ("v6e-2x2-reserved", "slice by slice: 1 slice, 1 at a time") in found
    assert (FLEX, "in slices made from now on; there is none") in found


def test_new_image_of_the_head_and_of_gateways_says_which_pods_to_delete() -> None:
    applied = applied_once()
    applied.wanted["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = "cpu:2"
    applied.group("gateway")["template"]["spec"]["containers"][0]["image"] = "cpu:2"
    rollout = decided(applied)
    assert rollout.outcome == Outcome.ROLLS
    assert "kubectl delete pod llm-v4944-head-" in effects(rollout)["head"]
    assert "one at a time: llm-v4944-gateway-worker-" in effects(rollout)["gateway"]


def test_slices_that_still_roll_are_said_although_nothing_is_new() -> None:
    applied = applied_once()
    for groups in (applied.wanted, applied.cluster["spec"]):
        (spot,) = (one for one in groups["workerGroupSpecs"] if one["groupName"] == SPOT)
        spot["template"]["metadata"]["annotations"]["slicewise.io/template-hash"] = "abc"
    rollout = decided(applied)
    assert rollout.outcome == Outcome.ROLLS
    assert rollout.steps[0].what == "3 pods that run are of an older template already"


def test_another_ray_needs_a_second_cluster_whose_chips_are_counted_before() -> None:
    applied = applied_again()
    applied.wanted["rayVersion"] = "2.61.0"
    rollout = decided(applied)
    assert rollout.outcome == Outcome.NOT_AS_APPLIED
    assert {one.subject for one in rollout.hindrances} >= {"cluster", SPOT}
    assert rollout.chips is not None
    assert (rollout.chips.num_needed, rollout.chips.num_refused) == (2 * NUM_USED, 4)
    # What does not depend on it comes all the same.
    assert effects(rollout) == {SPOT: "at once"}


def test_second_cluster_under_the_rendered_quota_is_refused_before_it_is_begun() -> None:
    rollout = decided(upgrading(applied_again()))
    assert rollout.outcome == Outcome.NOT_AS_APPLIED
    assert "32 in all; the quota allows 28: 4 of them would be refused" in f"{rollout.chips}"
    (hindrance,) = rollout.hindrances
    # Nothing of it needs a second cluster.
    assert hindrance.way == "set cluster.upgrade.kind: in_place, render and apply"


def test_second_cluster_that_cannot_be_had_in_place_either_says_what_is_left() -> None:
    applied = upgrading(applied_again())
    applied.wanted["rayVersion"] = "2.61.0"
    (hindrance,) = decided(applied).hindrances
    assert "raise the quota" in hindrance.way


@pytest.mark.parametrize("num_allowed", [2 * NUM_USED, None])
def test_second_cluster_with_chips_for_both_goes_on(num_allowed: int | None) -> None:
    rollout = decided(upgrading(applied_again()), num_allowed=num_allowed)
    assert rollout.outcome == Outcome.SECOND_CLUSTER
    assert effects(rollout) == {"cluster": "a second cluster, then the first one goes"}
    assert rollout.hindrances == ()


def test_bounds_alone_reach_no_cluster_where_kuberay_makes_second_ones() -> None:
    applied = upgrading(applied_once())
    applied.group(SPOT)["maxReplicas"] = 6
    rollout = decided(applied)
    assert rollout.outcome == Outcome.NOT_AS_APPLIED
    (hindrance,) = rollout.hindrances
    assert (hindrance.subject, hindrance.what) == (SPOT, "maxReplicas: 4 to 6")


def test_templates_carried_before_make_a_second_cluster_once_kuberay_may() -> None:
    applied = upgrading(applied_once())
    live = applied.group(SPOT, is_live=True)
    live["template"]["metadata"]["annotations"]["slicewise.io/template-hash"] = "abc"
    rollout = decided(applied, num_allowed=2 * NUM_USED)
    assert rollout.outcome == Outcome.SECOND_CLUSTER
    assert "carried in place before" in rollout.steps[0].what


def test_change_before_the_first_application_ran_whole_has_a_note() -> None:
    applied = applied_once()
    running = RunningCluster(
        applied.service, applied.cluster, with_chips(applied), is_promoted=False
    )
    assert decide_rollout(applied.service, running, QUOTA).notes == ()
    applied.group(SPOT)["maxReplicas"] = 6
    (words,) = decide_rollout(applied.service, running, QUOTA).notes
    assert "never tried" in words


def test_nothing_is_promised_while_there_are_two_clusters() -> None:
    rollout = decided(applied_again(), other_cluster="llm-other")
    assert rollout.outcome == Outcome.NOT_AS_APPLIED
    assert "llm-other" in rollout.hindrances[0].reason


def test_first_installation_is_said() -> None:
    wanted = applied_again().service
    assert decide_rollout(wanted, RunningCluster(), QUOTA).outcome == Outcome.FIRST_INSTALLATION


def test_raycluster_takes_what_is_applied_and_its_counts_fall_for_a_moment() -> None:
    applied = applied_once()
    wanted = copy.deepcopy(applied.cluster)
    spot = wanted["spec"]["workerGroupSpecs"][3]
    spot["replicas"], spot["maxReplicas"] = 0, 6
    rollout = decide_rollout(wanted, RunningCluster(None, applied.cluster, with_chips(applied)), 28)
    assert rollout.outcome == Outcome.IN_PLACE
    assert rollout.notes[0].startswith(f"{SPOT}: kubectl writes the count 0 over 3; no pod goes")


def test_report_has_every_step_and_the_verdict_last() -> None:
    applied = applied_again()
    applied.wanted["rayVersion"] = "2.61.0"
    lines = list(report_lines(decided(applied)))
    assert lines[0] == f"{SPOT}: maxReplicas: 4 to 6"
    assert "cluster: rayVersion: 2.60.0 to 2.61.0" in lines
    assert any(line.startswith("chips: a second cluster needs 16 chips beside") for line in lines)
    assert lines[-1] == "not as applied: part of it would not take effect"


def test_second_cluster_starts_with_the_counts_that_were_applied() -> None:
    applied = applied_once()
    for group in applied.wanted["workerGroupSpecs"]:
        group["replicas"] = 4 if group["groupName"] == SPOT else 0
    need = chip_need(applied.wanted, (), QUOTA)
    # The reserved group has a minimum of one.
    assert (need.num_used, need.num_started, need.num_needed) == (0, 20, 20)


def test_least_quota_of_chips_counts_and_quotas_of_other_things_do_not() -> None:
    quotas = [
        {"spec": {"hard": {"requests.google.com/tpu": "28"}}},
        {"spec": {"hard": {"requests.google.com/tpu": "12", "pods": "5"}}},
        {"spec": {"hard": {"pods": "3"}}},
    ]
    assert allowed_chips(quotas) == 12
    assert allowed_chips(quotas[2:]) is None
