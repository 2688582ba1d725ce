"""Each alert on the control plane fires when its cause happens, and not before.

The cause happens at a real API server, the product's own watches see it, and promtool evaluates the
shipped rules over exactly what their page shows. Foreign series are not here but in
`tests/deployments/observe/promtool`: `up`, which is Prometheus' own (HeadDown and ProvisionerSilent
of a target that is gone, GatewayDown).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autoscaling.provisioning.kubernetes import KubernetesAccess
from deployments.manifests.names import Component, component_labels
from deployments.manifests.redis import redis_labels
from deployments.manifests.values import Values
from serving.domain.supply.records import SupplyHost, SupplyRecord, SupplyState, WaitingReplica

from .api import Api, RefusedByServerError, reference, wait
from .on_call import OnCall, Page, Seen, alerts_of_the_rules, firing, on_call, series
from .proxy import Proxy
from .ray_objects import CLUSTER, NUM_HOSTS, SPOT, make_slice, set_count

pytestmark = [pytest.mark.process, pytest.mark.needs("promtool")]

Json = dict[str, Any]


@dataclass
class Scene:
    """An installation on the API server, its provisioner, and the way between them."""

    api: Api
    values: Values
    cluster: Json
    proxy: Proxy
    seen: OnCall
    control: dict[str, Json] = field(default_factory=dict)

    async def begin(self) -> Page:
        """Makes the control plane as it was rendered, every pod ready; the page then."""
        config = self.values.cluster
        labels = {
            "head": component_labels(config, Component.HEAD),
            "gateway-0": component_labels(config, Component.GATEWAY),
            "gateway-1": component_labels(config, Component.GATEWAY),
            "control-0": component_labels(config, Component.CONTROL),
            "control-1": component_labels(config, Component.CONTROL),
            "redis": redis_labels(config),
        }
        for name, of_pod in labels.items():
            self.control[name] = self.control_pod(name, of_pod)
        counts = {"head": 1, "gateway": 2, "control": 2, "redis": 1}
        return await self.seen.shows(
            {ready(name): exactly(count) for name, count in counts.items()}
        )

    @property
    def namespace(self) -> str:
        return self.values.cluster.namespace

    def control_pod(self, name: str, labels: dict[str, str]) -> Json:
        """A ready pod of the control plane, as KubeRay or a StatefulSet makes it."""
        pod = reference("Pod", self.namespace, name)
        pod["metadata"]["labels"] = labels | {"ray.io/cluster": CLUSTER}
        containers = [{"name": "one", "image": "none"}]
        pod["spec"] = {"schedulerName": "nobody", "containers": containers}
        made = self.api.create(pod)
        self.set_ready(made, is_ready=True)
        return made

    def set_ready(self, pod: Json, *, is_ready: bool) -> None:
        """What a kubelet says of it."""
        condition = {"type": "Ready", "status": str(is_ready)}
        self.api.merge(pod, {"status": {"conditions": [condition]}}, "status")


Cause = Callable[[Scene], Awaitable[Page]]


async def pods_wait_for_machines(scene: Scene) -> Page:
    set_count(scene.api, scene.cluster, SPOT, 1)
    make_slice(scene.api, scene.cluster, SPOT, 0)
    await scene.seen.shows(
        {series("slicewise_provisioning_machineless_pods", group=SPOT): lambda n: n == 2}
    )
    scene.seen.now_s += 1900
    scene.seen.report()
    oldest = series("slicewise_provisioning_oldest_machineless_seconds", group=SPOT)
    return await scene.seen.shows({oldest: lambda age_s: age_s > 1800})


async def image_cannot_be_pulled(scene: Scene) -> Page:
    set_count(scene.api, scene.cluster, SPOT, 1)
    pod, _ = make_slice(scene.api, scene.cluster, SPOT, 0)
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    status = {
        "name": "ray-worker",
        "image": "none",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    scene.api.merge(pod, {"status": {"containerStatuses": [status]}}, "status")
    name = series("slicewise_provisioning_hindered_pods", group=SPOT, reason="ImagePullBackOff")
    return await scene.seen.shows({name: lambda count: count == 1})


async def operator_is_away(scene: Scene) -> Page:
    scene.seen.report(waiting=(waiting_replica(),))
    missing = series("slicewise_provisioning_missing_slices", group=SPOT)
    return await scene.seen.shows({missing: lambda count: count == 1})


async def quota_is_used_up(scene: Scene) -> Page:
    quota = reference("ResourceQuota", scene.namespace, "few")
    num_pods = len(scene.control) + NUM_HOSTS
    quota["spec"] = {"hard": {"pods": f"{num_pods}"}}
    scene.api.create(quota)

    def counted() -> str:
        found = scene.api.get("ResourceQuota", scene.namespace, "few")
        return str(found.get("status", {}).get("used", {}).get("pods"))

    # Admission goes by what the quota's controller has counted.
    await asyncio.to_thread(wait, lambda: counted() == f"{len(scene.control)}", "it is counted")
    set_count(scene.api, scene.cluster, SPOT, 2)
    make_slice(scene.api, scene.cluster, SPOT, 0)
    await asyncio.to_thread(wait, lambda: counted() == f"{num_pods}", "the slice is counted")
    with pytest.raises(RefusedByServerError, match="exceeded quota: few"):
        make_slice(scene.api, scene.cluster, SPOT, 1)
    used = series("slicewise_quota_used", quota="few", resource="pods")
    missing = series("slicewise_provisioning_missing_slices", group=SPOT)
    return await scene.seen.shows({used: exactly(num_pods), missing: lambda n: n == 1})


async def gke_suspends_a_class(scene: Scene) -> Page:
    body = reference("ComputeClass", None, SPOT)
    body["spec"] = {"priorities": [{"machineType": "ct6e-standard-4t", "spot": True}]}
    scene.api.apply(body)
    when = "2026-11-23T12:00:00Z"
    condition = {
        "type": "ProvisioningSuspended",
        "status": "True",
        "reason": "OutOfResources",
        "message": "no capacity",
        "lastTransitionTime": when,
    }
    priority = {"identifier": "0", "conditions": [condition]}
    scene.api.merge(body, {"status": {"priorityStatuses": [priority]}}, "status")
    try:
        name = series("slicewise_class_suspended_priorities", class_name=SPOT)
        return await scene.seen.shows({name: lambda count: count == 1})
    finally:
        scene.api.delete(body)


async def head_is_not_ready(scene: Scene) -> Page:
    scene.set_ready(scene.control["head"], is_ready=False)
    return await scene.seen.shows(unready("head"))


async def redis_is_not_ready(scene: Scene) -> Page:
    scene.set_ready(scene.control["redis"], is_ready=False)
    return await scene.seen.shows(unready("redis"))


async def one_gateway_of_two_is_gone(scene: Scene) -> Page:
    scene.api.delete(scene.control["gateway-0"])
    return await scene.seen.shows({ready("gateway"): lambda count: count == 1})


async def one_control_pod_of_two_is_gone(scene: Scene) -> Page:
    scene.api.delete(scene.control["control-0"])
    return await scene.seen.shows({ready("control"): lambda count: count == 1})


async def rights_are_taken_away(scene: Scene) -> Page:
    (binding,) = [
        each
        for each in scene.api.list("RoleBinding", scene.namespace)
        if each["metadata"]["name"].endswith("slice-provisioner")
    ]
    scene.api.delete(binding)
    scene.proxy.cut()
    refused = series("slicewise_provisioning_failures_total", kind="refused")
    unreadable = series("slicewise_condition_readable", resource="resourcequotas", kind="refused")
    return await scene.seen.shows(
        {refused: lambda count: count > 0, unreadable: lambda value: value == 0}
    )


async def directory_falls_silent(scene: Scene) -> Page:
    scene.seen.now_s += 120
    age = "slicewise_provisioning_report_age_seconds"
    return await scene.seen.shows({age: lambda age_s: age_s >= 120})


async def more_is_wanted_than_a_group_may_have(scene: Scene) -> Page:
    scene.seen.report(waiting=tuple(waiting_replica(number) for number in range(40)))
    refused = series("slicewise_provisioning_refusals", group=SPOT)
    return await scene.seen.shows({refused: lambda count: count > 0})


async def machines_are_there_and_nobody_has_the_slice(scene: Scene) -> Page:
    scene.seen.report(slices=(record(SupplyState.BOOTING),))
    chips = series("slicewise_provisioning_unheld_chips", compute_class="spot", group=SPOT)
    await scene.seen.shows({chips: lambda count: count == 8})
    scene.seen.now_s += 1900
    scene.seen.report(slices=(record(SupplyState.BOOTING),))
    oldest = series(
        "slicewise_provisioning_oldest_unheld_seconds", compute_class="spot", group=SPOT
    )
    return await scene.seen.shows({oldest: lambda age_s: age_s > 1800})


async def slice_is_quarantined(scene: Scene) -> Page:
    scene.seen.report(slices=(record(SupplyState.QUARANTINED),))
    name = series(
        "slicewise_provisioning_slices", compute_class="spot", group=SPOT, state="quarantined"
    )
    await scene.seen.shows({name: lambda count: count == 1})
    scene.seen.now_s += 3700
    scene.seen.report(slices=(record(SupplyState.QUARANTINED),))
    oldest = series(
        "slicewise_provisioning_oldest_held_back_seconds",
        compute_class="spot",
        group=SPOT,
        state="quarantined",
    )
    return await scene.seen.shows({oldest: lambda age_s: age_s > 3600})


async def operator_freezes_scaling_down(scene: Scene) -> Page:
    scene.seen.report(frozen="freeze ordered by anna: a demonstration")
    return await scene.seen.shows({"slicewise_provisioning_frozen": bool})


def exactly(number: float) -> Callable[[float], bool]:
    return lambda value: value == number


def ready(component: str) -> str:
    return series("slicewise_control_pods", component=component, state="ready")


def unready(component: str) -> dict[str, Callable[[float], bool]]:
    return {
        ready(component): lambda n: n == 0,
        series("slicewise_control_pods", component=component, state="unready"): lambda n: n == 1,
    }


def waiting_replica(number: int = 0) -> WaitingReplica:
    return WaitingReplica(
        life_id=f"replica-{number}",
        model="demo",
        compute_class="spot",
        generation="v6e",
        topology="2x4",
        since_s=0.0,
    )


def record(state: SupplyState) -> SupplyRecord:
    """The directory's, of a slice with its machines."""
    return SupplyRecord(
        incarnation="pod-0",
        name=f"{SPOT}-0",
        state=state,
        reason="the test says so",
        since_s=0.0,
        compute_class="spot",
        generation="v6e",
        topology="2x4",
        num_chips=8,
        hosts=tuple(SupplyHost(n, f"pod-{n}", f"machine-{n}") for n in range(2)),
        group=SPOT,
    )


# With the labels that tell which it is, and the minutes after which it has to fire.
CAUSES: dict[str, tuple[Cause, dict[str, str], float]] = {
    "SlicePodsPending": (pods_wait_for_machines, {"group": SPOT}, 2),
    "SlicePodsCannotStart": (
        image_cannot_be_pulled,
        {"group": SPOT, "reason": "ImagePullBackOff"},
        6,
    ),
    "SlicesNotCreated": (operator_is_away, {"group": SPOT}, 6),
    "QuotaExhausted": (quota_is_used_up, {"quota": "few", "resource": "pods"}, 6),
    "ClassSuspended": (gke_suspends_a_class, {"class_name": SPOT}, 11),
    "HeadDown": (head_is_not_ready, {}, 3),
    "RedisDown": (redis_is_not_ready, {}, 3),
    "GatewaysMissing": (one_gateway_of_two_is_gone, {}, 11),
    "ControlPodsMissing": (one_control_pod_of_two_is_gone, {}, 11),
    "ConditionUnreadable": (
        rights_are_taken_away,
        {"resource": "resourcequotas", "kind": "refused"},
        16,
    ),
    "DirectorySilent": (directory_falls_silent, {}, 2),
    "ChangesRefused": (more_is_wanted_than_a_group_may_have, {"group": SPOT}, 16),
    "ChipsUnheld": (
        machines_are_there_and_nobody_has_the_slice,
        {"compute_class": "spot"},
        2,
    ),
    "SlicesHeldBack": (
        slice_is_quarantined,
        {"compute_class": "spot", "state": "quarantined"},
        2,
    ),
    "ScalingFrozen": (operator_freezes_scaling_down, {}, 241),
}
# Of these a single page does not tell: a round fails again, or Prometheus' own series are read.
OTHERWISE = {"ProvisionerFailing", "ProvisionerSilent"}


def test_every_alert_has_a_cause_here() -> None:
    assert set(alerts_of_the_rules()) == {*CAUSES, *OTHERWISE}


@pytest.mark.parametrize("alert", CAUSES)
async def test_alert_fires_when_its_cause_happens_and_not_before(
    alert: str,
    api: Api,
    namespace: Values,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    tmp_path: Path,
) -> None:
    cause, labels, minutes = CAUSES[alert]
    async with on_call(access) as seen:
        scene = Scene(api, namespace, cluster, proxy, seen)
        before = await scene.begin()
        after = await cause(scene)
    assert firing(tmp_path, Seen(before, minutes)) == {}
    found = firing(tmp_path, Seen(before, 1), Seen(after, minutes))
    (fired,) = [each for each in found[alert] if labels.items() <= each.items()]
    assert fired["installation"] == namespace.cluster.name


async def test_rounds_that_are_refused_again_and_again_raise_an_alert_and_recovery_ends_it(
    api: Api,
    namespace: Values,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    tmp_path: Path,
) -> None:
    refused = series("slicewise_provisioning_failures_total", kind="refused")
    async with on_call(access) as seen:
        scene = Scene(api, namespace, cluster, proxy, seen)
        before = await scene.begin()
        (binding,) = [
            each
            for each in api.list("RoleBinding", scene.namespace)
            if each["metadata"]["name"].endswith("slice-provisioner")
        ]
        first = await rights_are_taken_away(scene)
        more = await seen.shows({refused: lambda count: count > first[refused]})
        made = {key: binding[key] for key in ("apiVersion", "kind", "roleRef", "subjects")}
        metadata = {key: binding["metadata"][key] for key in ("name", "namespace")}
        api.create(made | {"metadata": metadata})
        seen.now_s = 600.0
        seen.report()
        well = "slicewise_provisioning_success_time_seconds"
        after = await seen.shows({well: lambda at_s: at_s == 600.0})
    # Time begins at 0, when the last round went well.
    assert "ProvisionerFailing" not in firing(tmp_path, Seen(before, 2))
    assert "ProvisionerFailing" in firing(tmp_path, Seen(before, 1), Seen(first, 3), Seen(more, 2))
    assert "ProvisionerFailing" not in firing(
        tmp_path, Seen(before, 1), Seen(first, 3), Seen(more, 5), Seen(after, 2)
    )
