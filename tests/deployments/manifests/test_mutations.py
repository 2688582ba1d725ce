"""Manifests changed by hand are refused, with file, object, field, value and what is allowed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from deployments.validation.documents import Folder, KubernetesManifest
from serving.domain.topology import slice_shape

from .examples import found, in_memory, raw_values

SHAPE = slice_shape("v6e", "4x4")
SINGLE_SHAPE = slice_shape("v6e", "2x2")
RAW = raw_values(
    (SHAPE, "reserved"),
    (SHAPE, "spot"),
    (slice_shape("tpu7x", "2x2x2"), "on-demand"),
    (SINGLE_SHAPE, "spot"),
    dranet=True,
    redis={"own": {"image": "redis:7.4"}},
)
GROUP = "v6e-4x4-spot"
SINGLE = "v6e-2x2-spot"
HOST_INDEX = "ray.io/replica-host-index"
AT = "kuberay/rayservice/rayservice.yaml: RayService/llm: spec.rayClusterConfig"
CLASSES = "gke/compute-classes.yaml: ComputeClass"

Json = dict[str, Any]


def changed(kind: str, name: str | None, change: Callable[[Json], object]) -> Folder:
    """The folder with an object changed; wherever it is, if several files have it."""
    folder = in_memory(RAW)
    manifests = []
    for each in folder.manifests:
        if each.kind == kind and name in (None, each.name):
            body = copy.deepcopy(each.body)
            change(body)
            manifests.append(KubernetesManifest(each.file, body))
        else:
            manifests.append(each)
    assert manifests != list(folder.manifests)
    return Folder(tuple(manifests), folder.serve_configs, folder.files)


def cluster_of(body: Json) -> Json:
    found: Json = body["spec"]["rayClusterConfig"]
    return found


def group_of(body: Json, name: str = GROUP) -> Json:
    groups = cluster_of(body)["workerGroupSpecs"]
    found: Json = next(group for group in groups if group["groupName"] == name)
    return found


def pod_of(body: Json) -> Json:
    pod: Json = group_of(body)["template"]["spec"]
    return pod


def variable_of(body: Json, name: str) -> Json:
    """A variable of Ray's container."""
    (found,) = [each for each in pod_of(body)["containers"][0]["env"] if each["name"] == name]
    variable: Json = found
    return variable


def labels_of(owner: Json) -> Json:
    """The labels of a pod template."""
    found: Json = owner["template"]["metadata"]["labels"]
    return found


def check_of(body: Json) -> Json:
    check: Json = body["spec"]["default"]["config"]["httpHealthCheck"]
    return check


def container_of(body: Json) -> Json:
    container: Json = body["spec"]["template"]["spec"]["containers"][0]
    return container


def rule_of(body: Json) -> Json:
    rule: Json = body["spec"]["priorities"][0]
    return rule


def test_unchanged_manifests_have_no_problem() -> None:
    assert found(in_memory(RAW)) == []


IN_GROUP: dict[str, tuple[Callable[[Json], object], str]] = {
    "topology that there is not": (
        lambda body: pod_of(body)["nodeSelector"].update(
            {"cloud.google.com/gke-tpu-topology": "4x5"}
        ),
        "template.spec.nodeSelector[cloud.google.com/gke-tpu-topology]: no v6e slice of this "
        'topology can be reserved (value "4x5"); nearest allowed: 2x4, 4x4, 4x8',
    ),
    "topology of another size": (
        lambda body: pod_of(body)["nodeSelector"].update(
            {"cloud.google.com/gke-tpu-topology": "4x8"}
        ),
        "numOfHosts: a v6e 4x8 slice with 4 chips per host has another number of hosts (value 4); "
        "allowed: 8",
    ),
    "hosts": (
        lambda body: group_of(body).update(numOfHosts=2),
        "numOfHosts: a v6e 4x4 slice with 4 chips per host has another number of hosts (value 2); "
        "allowed: 4",
    ),
    "generation": (
        lambda body: pod_of(body)["nodeSelector"].update(
            {"cloud.google.com/gke-tpu-accelerator": "tpu-v6"}
        ),
        "template.spec.nodeSelector[cloud.google.com/gke-tpu-accelerator]: no TPU of GKE's "
        '(value "tpu-v6"); allowed: tpu-v4-podslice',
    ),
    "label of Ray": (
        lambda body: group_of(body)["labels"].update({"ray.io/tpu-pod-type": "v6e-8"}),
        "labels[ray.io/tpu-pod-type]: not what Ray finds on these hosts "
        '(value "v6e-8"); allowed: v6e-16',
    ),
    "market": (
        lambda body: group_of(body)["labels"].update({"ray.io/market-type": "on-demand"}),
        "labels[ray.io/market-type]: not the market of its ComputeClass, whose rule is spot "
        '(value "on-demand"); allowed: spot',
    ),
    "market that reservations do not select": (
        lambda body: group_of(body)["labels"].update({"ray.io/market-type": "on-demand"}),
        "labels[ray.io/market-type]: no worker group has slices that deployment engine-demo-0-spot "
        'would take (value "on-demand"); required: a group with ray.io/market-type=spot, '
        "ray.io/tpu-pod-type=v6e-16, ray.io/tpu-topology=4x4",
    ),
    "label of the compute class": (
        lambda body: group_of(body)["labels"].pop("slicewise.io/compute-class"),
        "labels[slicewise.io/compute-class]: missing: the slice provisioner goes by it",
    ),
    "chips": (
        lambda body: [
            pod_of(body)["containers"][0]["resources"][kind].update({"google.com/tpu": "8"})
            for kind in ("limits", "requests")
        ],
        "template.spec.containers[0].resources.limits[google.com/tpu]: not the chips of a host of "
        'a v6e 4x4 slice (value "8"); allowed: 4',
    ),
    "requested chips": (
        lambda body: pod_of(body)["containers"][0]["resources"]["requests"].update(
            {"google.com/tpu": "2"}
        ),
        "template.spec.containers[0].resources.requests[google.com/tpu]: not the limit "
        '(value "2"); allowed: the limit, 4',
    ),
    "grace": (
        lambda body: pod_of(body).update(terminationGracePeriodSeconds=20),
        "template.spec.terminationGracePeriodSeconds: shorter than a replica's end on compute "
        "class spot, which drains for 15 s (value 20); allowed: at least 25",
    ),
    "no grace": (
        lambda body: group_of(body, "tpu7x-2x2x2-on-demand")["template"]["spec"].pop(
            "terminationGracePeriodSeconds"
        ),
        "template.spec.terminationGracePeriodSeconds: shorter than a replica's end on compute "
        "class on-demand, which drains for 120 s (value 30); allowed: at least 130",
    ),
    "no hook": (
        lambda body: pod_of(body)["containers"][0].pop("lifecycle"),
        "template.spec.containers[0].lifecycle.preStop: missing: the slice would not be left "
        "before its pod ends; required: a command that waits",
    ),
    "hook that tells another end": (
        lambda body: variable_of(body, "SLICEWISE_END_WITHIN_S").update(value="60"),
        "template.spec.containers[0].env[SLICEWISE_END_WITHIN_S]: the hook would tell an end that "
        "is not the pod's (value \"60\"); allowed: more than 0, up to the pod's grace of 45",
    ),
    "hook that tells less than the drain": (
        lambda body: variable_of(body, "SLICEWISE_END_WITHIN_S").update(value="14"),
        "template.spec.containers[0].env[SLICEWISE_END_WITHIN_S]: told sooner than compute class "
        'spot drains, which takes 15 s of notice (value "14"); allowed: at least 15; a shorter '
        "drain_notice_s of the class, or where a spot node's shutdown lasts longer "
        "(cluster.spot_shutdown_s)",
    ),
    "no node reader": (
        lambda body: pod_of(body).pop("initContainers"),
        "template.spec.initContainers: no node reader: what Kubernetes announces of the node would "
        "reach nobody; required: a container that runs autoscaling.node_reader",
    ),
    "node reader in another folder": (
        lambda body: pod_of(body)["initContainers"][0]["volumeMounts"].pop(),
        "template.spec.volumes: container node-reader does not have the run directory "
        '(value "/var/run/slicewise"); required: a volume at SLICEWISE_RUN_DIR',
    ),
    "compute class": (
        lambda body: pod_of(body)["nodeSelector"].update(
            {"cloud.google.com/compute-class": "v6e-4x4-reserved"}
        ),
        "template.spec.nodeSelector[cloud.google.com/compute-class]: not the group's name, and "
        f'each kind of slice has a class of its own (value "v6e-4x4-reserved"); allowed: {GROUP}',
    ),
    "toleration of the class": (
        lambda body: pod_of(body)["tolerations"].pop(),
        "template.spec.tolerations: does not tolerate the taint cloud.google.com/compute-class="
        f'{GROUP}:NoSchedule of its nodes (value "google.com/tpu"); required: a toleration of '
        "cloud.google.com/compute-class",
    ),
    "toleration of chips": (
        lambda body: pod_of(body)["tolerations"].pop(0),
        "template.spec.tolerations: does not tolerate the taint google.com/tpu=present:NoSchedule "
        'of its nodes (value "cloud.google.com/compute-class"); required: a toleration of '
        "google.com/tpu",
    ),
    "toleration of flex-start": (
        lambda body: pod_of(body)["tolerations"].append(
            {"key": "cloud.google.com/gke-flex-start", "operator": "Exists"}
        ),
        "template.spec.tolerations: nodes of a class have no such taint, and GKE may refuse the "
        'class for it (value "cloud.google.com/gke-flex-start"); allowed: without it',
    ),
    "idle timeout": (
        lambda body: group_of(body).update(idleTimeoutSeconds=600),
        "idleTimeoutSeconds: Ray's autoscaler would take idle slices away, half of one if need be "
        "(value 600); allowed: at least 10000000",
    ),
    "no idle timeout": (
        lambda body: group_of(body).pop("idleTimeoutSeconds"),
        "idleTimeoutSeconds: Ray's autoscaler would take idle slices away, half of one if need be; "
        "allowed: at least 10000000",
    ),
    "replicas": (
        lambda body: group_of(body).update(replicas=2),
        "replicas: not minReplicas, and from there on the slice provisioner sets it (value 2); "
        "allowed: 0",
    ),
    "bounds": (
        lambda body: group_of(body).update(minReplicas=3, replicas=3),
        "maxReplicas: no bounds for a number of slices",
    ),
    "too few slices": (
        lambda body: group_of(body, "v6e-4x4-reserved").update(maxReplicas=0),
        "maxReplicas: fewer slices than replicas may want (value 0); allowed: 1 or more",
    ),
    "start parameter": (
        lambda body: group_of(body)["rayStartParams"].update(labels="a=b"),
        "rayStartParams.labels: KubeRay refuses labels here",
    ),
    "label by which the webhook finds pods": (
        lambda body: labels_of(group_of(body)).update({"app.kubernetes.io/name": "slicewise"}),
        "template.metadata.labels[app.kubernetes.io/name]: KubeRay's own label, by which the TPU "
        'webhook and KubeRay\'s Services find its pods (value "slicewise"); allowed: nothing, it '
        "is not ours",
    ),
    "label of KubeRay's": (
        lambda body: labels_of(group_of(body)).update({"ray.io/worker-group-replica-index": "7"}),
        "template.metadata.labels[ray.io/worker-group-replica-index]: KubeRay and the TPU webhook "
        'set it on every pod, and count by it (value "7"); allowed: nothing, it is not ours',
    ),
    "label of KubeRay's by way of the group": (
        lambda body: group_of(body)["labels"].update({"app.kubernetes.io/name": "slicewise"}),
        "labels[app.kubernetes.io/name]: it reaches the pods, where KubeRay and the TPU webhook "
        'set it (value "slicewise"); allowed: nothing, it is not for a group to say',
    ),
    "label that makes a host a gateway": (
        lambda body: group_of(body)["labels"].update({"app.kubernetes.io/component": "gateway"}),
        "labels[app.kubernetes.io/component]: it reaches the pods, where our Services, policies "
        'and budgets select by it (value "gateway"); allowed: nothing',
    ),
    "single host without its index": (
        lambda body: labels_of(group_of(body, SINGLE)).pop(HOST_INDEX),
        f"template.metadata.labels[{HOST_INDEX}]: on slices of one host KubeRay sets none, and the "
        'TPU webhook then gives a new slice the name of a living one; allowed: "0"',
    ),
    "single host with another's index": (
        lambda body: labels_of(group_of(body, SINGLE)).update({HOST_INDEX: "1"}),
        'the name of a living one (value "1"); allowed: "0"',
    ),
    "several hosts with one index": (
        lambda body: labels_of(group_of(body)).update({HOST_INDEX: "0"}),
        f"template.metadata.labels[{HOST_INDEX}]: each of the 4 hosts has its own, which KubeRay "
        'sets (value "0"); allowed: nothing',
    ),
    "gateway with an index": (
        lambda body: labels_of(group_of(body, "gateway")).update({HOST_INDEX: "0"}),
        f"template.metadata.labels[{HOST_INDEX}]: its pods are no hosts of slices "
        '(value "0"); allowed: nothing',
    ),
    "named pods": (
        lambda body: group_of(body).update(scaleStrategy={"workersToDelete": ["pod"]}),
        "scaleStrategy: only the slice provisioner names pods to delete",
    ),
}


@pytest.mark.parametrize("case", IN_GROUP)
def test_changed_group_is_refused(case: str) -> None:
    change, words = IN_GROUP[case]
    problems = found(changed("RayService", "llm", change))
    where = f"{AT}.workerGroupSpecs["
    assert any(each.startswith(where) and words in each for each in problems), problems
    assert all(each.startswith((AT, CLASSES, "gke/resource-quota.yaml")) for each in problems)


IN_CLUSTER: dict[str, tuple[Callable[[Json], object], str]] = {
    "authOptions.mode": (
        lambda cluster: cluster["authOptions"].update(mode="disabled"),
        'whoever reaches Ray\'s ports could run code (value "disabled"); allowed: token',
    ),
    "enableInTreeAutoscaling": (
        lambda cluster: cluster.update(enableInTreeAutoscaling=False),
        "without it KubeRay deletes surplus slices at random (value false); allowed: true",
    ),
    "autoscalerOptions.version": (
        lambda cluster: cluster["autoscalerOptions"].update(version="v1"),
        'only version 2 knows a group\'s idle timeout (value "v1"); allowed: v2',
    ),
    "gcsFaultToleranceOptions.redisAddress": (
        lambda cluster: cluster.pop("gcsFaultToleranceOptions"),
        "missing: the head's death would cost every engine; required: Redis",
    ),
    "gcsFaultToleranceOptions.redisAddress: there": (
        lambda cluster: cluster["gcsFaultToleranceOptions"].update(
            redisAddress="redis.serving.svc:6379"
        ),
        'there is no Redis with a Service at this address (value "redis.serving.svc:6379"); '
        "allowed: llm-redis.serving.svc:6379, or an address outside the namespace",
    ),
    "gcsFaultToleranceOptions.redisPassword": (
        lambda cluster: cluster["gcsFaultToleranceOptions"].pop("redisPassword"),
        "missing: whoever reaches Redis could change what Ray runs; required: "
        "valueFrom.secretKeyRef",
    ),
    "gcsFaultToleranceOptions.redisPassword: a": (
        lambda cluster: cluster["gcsFaultToleranceOptions"].update(
            redisPassword={"value": "hunter2"}
        ),
        'a password stands in the manifest (value "(hidden)")',
    ),
    "gcsFaultToleranceOptions.externalStorageNamespace": (
        lambda cluster: cluster["gcsFaultToleranceOptions"].update(externalStorageNamespace="llm"),
        'an upgrade\'s two clusters would share their state (value "llm")',
    ),
    "headGroupSpec.rayStartParams.num-cpus": (
        lambda cluster: cluster["headGroupSpec"]["rayStartParams"].pop("num-cpus"),
        'parts of the application would be lost with the head; allowed: "0"',
    ),
    "headGroupSpec.template.metadata.labels[app.kubernetes.io/name]": (
        lambda cluster: labels_of(cluster["headGroupSpec"]).update(
            {"app.kubernetes.io/name": "slicewise"}
        ),
        "KubeRay's own label, by which the TPU webhook and KubeRay's Services find its pods "
        '(value "slicewise"); allowed: nothing, it is not ours',
    ),
    "headGroupSpec.template.spec.initContainers": (
        lambda cluster: cluster["headGroupSpec"]["template"]["spec"].pop("initContainers"),
        "no slice would ever be asked for; required: a container slice-provisioner",
    ),
    "headGroupSpec.template.spec.containers[0].env[RAY_worker_niceness]": (
        lambda cluster: cluster["headGroupSpec"]["template"]["spec"]["containers"][0].update(
            env=[]
        ),
        'not what Ray is started with everywhere else; allowed: "0"',
    ),
    "workerGroupSpecs[gateway].template.spec.containers[0].env[RAY_SERVE_ENABLE_HA_PROXY]": (
        lambda cluster: cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0][
            "env"
        ].remove({"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"}),
        'not what Ray is started with everywhere else; allowed: "1"',
    ),
    "workerGroupSpecs[gateway].template.spec.containers[0].readinessProbe": (
        lambda cluster: cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].pop(
            "readinessProbe"
        ),
        "without one KubeRay's asks with wget, which no image has: never ready; required: httpGet",
    ),
    "headGroupSpec.template.spec.serviceAccountName": (
        lambda cluster: cluster["headGroupSpec"]["template"]["spec"].update(
            serviceAccountName="llm-gateway"
        ),
        "the slice provisioner may not list, patch, watch rayclusters (value "
        '"llm-gateway"); required: a Role with that, bound to llm-gateway',
    ),
}


@pytest.mark.parametrize("field", IN_CLUSTER)
def test_changed_cluster_is_refused(field: str) -> None:
    change, words = IN_CLUSTER[field]
    problems = found(changed("RayService", "llm", lambda body: change(cluster_of(body))))
    assert any(each.startswith(f"{AT}.{field}") and words in each for each in problems), problems


def _only(body: Json) -> None:
    body["spec"]["priorities"].append(copy.deepcopy(rule_of(body)))


IN_CLASS: dict[str, tuple[str, Callable[[Json], object], str]] = {
    "machine": (
        GROUP,
        lambda body: rule_of(body).update(machineType="ct6e-standard-8t"),
        "spec.priorities[0].machineType: not a machine with 4 chips of v6e "
        '(value "ct6e-standard-8t"); allowed: ct6e-standard-4t',
    ),
    "chips": (
        GROUP,
        lambda body: rule_of(body)["tpu"].update(count=8),
        "spec.priorities[0].tpu.count: no host of a v6e 4x4 slice has that many chips "
        '(value "8"); nearest allowed: 4',
    ),
    "topology": (
        GROUP,
        lambda body: rule_of(body)["tpu"].update(topology="4x8"),
        f"spec.priorities[0].tpu.topology: not what the pods of group {GROUP} select "
        '(value "4x8"); allowed: 4x4',
    ),
    "generation": (
        GROUP,
        lambda body: rule_of(body)["tpu"].update(type="tpu-v6e"),
        "spec.priorities[0].tpu.type: no TPU of GKE's",
    ),
    "several rules": (
        GROUP,
        _only,
        f"spec.priorities: group {GROUP} serves from it, and of several rules nobody says which "
        'one won (value "2 rules"); allowed: one rule',
    ),
    "machines without chips": (
        GROUP,
        lambda body: body["spec"].update(whenUnsatisfiable="ScaleUpAnyway"),
        'spec.whenUnsatisfiable: GKE would make machines without chips (value "ScaleUpAnyway")',
    ),
    "migration": (
        GROUP,
        lambda body: body["spec"]["activeMigration"].update(optimizeRulePriority=True),
        "spec.activeMigration.optimizeRulePriority: GKE would restart running engines",
    ),
    "consolidation": (
        GROUP,
        lambda body: body["spec"]["autoscalingPolicy"].update(consolidationThreshold=50),
        "spec.autoscalingPolicy.consolidationThreshold: GKE would take hosts that still have pods "
        "(value 50); allowed: 0",
    ),
    "shutdown": (
        GROUP,
        lambda body: rule_of(body)["nodeSystemConfig"]["kubeletConfig"].update(
            shutdownGracePeriodSeconds=0
        ),
        "kubeletConfig.shutdownGracePeriodSeconds: less the critical pods' 15 shorter than the "
        "drain of 15 s (value 0); allowed: 120",
    ),
    "claims that nobody serves": (
        GROUP,
        lambda body: body["spec"]["nodePoolConfig"].pop("dra"),
        f"spec.nodePoolConfig.dra.networking.enabled: pods of group {GROUP} claim network "
        "interfaces, which nobody would give (value false); allowed: true",
    ),
    "reservation by any name": (
        "v6e-4x4-reserved",
        lambda body: rule_of(body).update(reservations={"affinity": "AnyBestEffort"}),
        "spec.priorities[0].reservations.affinity: chips are reserved by name only "
        '(value "AnyBestEffort"); allowed: Specific',
    ),
    "zones beside a reservation": (
        "v6e-4x4-reserved",
        lambda body: rule_of(body).update(location={"zones": ["us-east5-b"]}),
        "spec.priorities[0].location.zones: stands against the reservation's own zones",
    ),
    "policy of several hosts": (
        "tpu7x-2x2x2-on-demand",
        lambda body: rule_of(body).pop("placement"),
        "spec.priorities[0].placement.policyName: missing: TPU7x slices of several hosts",
    ),
    "disk": (
        "tpu7x-2x2x2-on-demand",
        lambda body: rule_of(body).pop("storage"),
        "spec.priorities[0].storage.bootDiskType: TPU7x starts from no other",
    ),
}


@pytest.mark.parametrize("case", IN_CLASS)
def test_changed_class_is_refused(case: str) -> None:
    name, change, words = IN_CLASS[case]
    problems = found(changed("ComputeClass", name, change))
    assert any(each.startswith(f"{CLASSES}/{name}: ") and words in each for each in problems), (
        problems
    )


ELSEWHERE: dict[str, tuple[str, str, Callable[[Json], object], str]] = {
    "policy that selects nothing": (
        "NetworkPolicy",
        "llm-gateways",
        lambda body: body["spec"]["podSelector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "gate"}
        ),
        "; allowed: labels that pods have; their "
        "app.kubernetes.io/component is one of control, engine, gateway, head",
    ),
    "budget that Kubernetes cannot count": (
        "PodDisruptionBudget",
        "llm-gateway",
        lambda body: (body["spec"].pop("minAvailable"), body["spec"].update(maxUnavailable=1)),
        "spec.minAvailable: Kubernetes counts the pods of a RayCluster in no other way (value 1)",
    ),
    "monitor": (
        "PodMonitor",
        "llm-tpu-exporter",
        lambda body: (
            body["spec"]["selector"]["matchLabels"].clear()
            or body["spec"]["selector"].update(
                matchExpressions=[{"key": "x", "operator": "Exists"}]
            )
        ),
        "spec.selector: selects no pod",
    ),
    "account": (
        "RayService",
        "llm",
        lambda body: body["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(
            serviceAccountName="nobody"
        ),
        'serviceAccountName: there is no ServiceAccount of this name (value "nobody"); allowed: '
        "llm-control, llm-engine, llm-gateway, llm-head, llm-redis",
    ),
    "priority": (
        "RayService",
        "llm",
        lambda body: body["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(
            priorityClassName="high"
        ),
        'priorityClassName: there is no PriorityClass of this name (value "high"); allowed: '
        "llm-control, llm-engine",
    ),
    "quota": (
        "ResourceQuota",
        "llm-chips",
        lambda body: body["spec"]["hard"].update({"requests.google.com/tpu": "8"}),
        "spec.hard[requests.google.com/tpu]: fewer chips than the groups of RayService llm may "
        'have (value "8"); allowed: 88',
    ),
    "load balancer that asks for a page behind keys": (
        "HealthCheckPolicy",
        "llm",
        lambda body: body["spec"]["default"]["config"]["httpHealthCheck"].update(requestPath="/"),
        "spec.default.config.httpHealthCheck.requestPath: only one path says whether the cluster "
        'can serve, and needs no key (value "/"); allowed: /ready',
    ),
    "gateway that is ready with its proxy": (
        "RayService",
        "llm",
        lambda body: group_of(body, "gateway")["template"]["spec"]["containers"][0][
            "readinessProbe"
        ]["httpGet"].update(path="/-/healthz"),
        f"{AT}.workerGroupSpecs[gateway].template.spec.containers[0].readinessProbe.httpGet.path: "
        'requests would come before the cluster has an engine (value "/-/healthz"); allowed: '
        "/ready",
    ),
    "gateway that is ended before its answers are": (
        "RayService",
        "llm",
        lambda body: group_of(body, "gateway")["template"]["spec"].update(
            terminationGracePeriodSeconds=120
        ),
        f"{AT}.workerGroupSpecs[gateway].template.spec.terminationGracePeriodSeconds: shorter than "
        "rollout.gateway_drain_s: answers would be cut (value 120); allowed: at least 600",
    ),
    "gateway that nobody tells of its end": (
        "RayService",
        "llm",
        lambda body: group_of(body, "gateway")["template"]["spec"]["containers"][0].pop(
            "lifecycle"
        ),
        f"{AT}.workerGroupSpecs[gateway].template.spec.containers[0].lifecycle.preStop: missing: "
        "Ray ends at the first signal, and answers would be cut; required: a command that drains "
        "the node",
    ),
    "control processes beside the gateways": (
        "RayService",
        "llm",
        lambda body: group_of(body, "control").pop("labels"),
        f"{AT}.workerGroupSpecs: no group for control processes: they would be on the gateways' "
        "pods; required: a group with the label slicewise.io/role=control",
    ),
    "control processes without a second pod": (
        "RayService",
        "llm",
        lambda body: group_of(body, "control").update(replicas=1),
        f"{AT}.workerGroupSpecs[control].replicas: too few for 6 control processes while one pod "
        "is away: each takes 20 (value 1); allowed: at least 2",
    ),
    "control processes on a part of a CPU": (
        "RayService",
        "llm",
        lambda body: group_of(body, "control")["template"]["spec"]["containers"][0]["resources"][
            "limits"
        ].update(cpu="500m"),
        f"{AT}.workerGroupSpecs[control].template.spec.containers[0].resources.limits.cpu: Ray "
        'takes its number of control processes from it (value "500m"); allowed: a whole number',
    ),
    "control processes that are ended before they hand over": (
        "RayService",
        "llm",
        lambda body: group_of(body, "control")["template"]["spec"].update(
            terminationGracePeriodSeconds=60
        ),
        f"{AT}.workerGroupSpecs[control].template.spec.terminationGracePeriodSeconds: shorter than "
        "what Serve gives a replica to end: engines would be left without one (value 60); allowed:",
    ),
    "control processes that nobody tells of their end": (
        "RayService",
        "llm",
        lambda body: group_of(body, "control")["template"]["spec"]["containers"][0].pop(
            "lifecycle"
        ),
        f"{AT}.workerGroupSpecs[control].template.spec.containers[0].lifecycle.preStop: missing: "
        "Ray ends at the first signal, and engines would be left without one; required: a command "
        "that drains the node",
    ),
    "load balancer that asks for nothing": (
        "HealthCheckPolicy",
        "llm",
        lambda body: body["spec"]["targetRef"].update(name="other"),
        "the load balancer would ask llm-gateways for /, and find every gateway unhealthy",
    ),
    "health check of a port, by default of another": (
        "HealthCheckPolicy",
        "llm",
        lambda body: check_of(body).pop("portSpecification"),
        "spec.default.config.httpHealthCheck.portSpecification: the API server refuses it together "
        "with port; allowed: USE_FIXED_PORT",
    ),
    "health check of a fixed port that it does not name": (
        "HealthCheckPolicy",
        "llm",
        lambda body: check_of(body).pop("port"),
        "spec.default.config.httpHealthCheck.portSpecification: the API server refuses it together "
        'with nothing (value "USE_FIXED_PORT"); allowed: USE_SERVING_PORT',
    ),
    "health check that waits into the next one": (
        "HealthCheckPolicy",
        "llm",
        lambda body: body["spec"]["default"].update(timeoutSec=6),
        "spec.default.timeoutSec: longer than checkIntervalSec, which the API server refuses "
        "(value 6); allowed: at most 5",
    ),
    "route to KubeRay's Service": (
        "HTTPRoute",
        "llm",
        lambda body: body["spec"]["rules"][0]["backendRefs"][0].update(name="llm-serve-svc"),
        "spec.rules.backendRefs: KubeRay's own: it is there only once every first replica has had "
        "a slice, and leads to hosts of slices, where nothing listens "
        '(value "llm-serve-svc"); allowed: llm-gateways',
    ),
    "health check of KubeRay's Service": (
        "HealthCheckPolicy",
        "llm",
        lambda body: body["spec"]["targetRef"].update(name="llm-serve-svc"),
        "spec.targetRef.name: KubeRay's own: it is there only once",
    ),
    "time limits of no Service": (
        "GCPBackendPolicy",
        "llm",
        lambda body: body["spec"]["targetRef"].update(name="other"),
        'spec.targetRef.name: no such Service (value "other"); allowed: llm-gateways',
    ),
    "Service of every worker": (
        "Service",
        "llm-gateways",
        lambda body: body["spec"].update(selector={"ray.io/node-type": "worker"}),
        "spec.rules.backendRefs: this Service leads to pods that are no gateways: "
        "control, tpu7x-2x2x2-on-demand, v6e-2x2-spot, v6e-4x4-reserved, v6e-4x4-spot "
        '(value "llm-gateways"); allowed: nothing',
    ),
    "route to Redis": (
        "HTTPRoute",
        "llm",
        lambda body: body["spec"]["rules"][0]["backendRefs"][0].update(name="llm-redis"),
        "spec.rules.backendRefs: this Service leads to pods that are no gateways: nothing of Ray's "
        '(value "llm-redis"); allowed: llm-gateways',
    ),
    "Service by a label that KubeRay keeps": (
        "Service",
        "llm-gateways",
        lambda body: body["spec"]["selector"].update({"app.kubernetes.io/name": "slicewise"}),
        "spec.selector: selects no pod",
    ),
    "load balancer that cuts answers": (
        "GCPBackendPolicy",
        "llm",
        lambda body: body["spec"]["default"].pop("timeoutSec"),
        "spec.default.timeoutSec: streams are as long as their answers; allowed: at least 300",
    ),
    "load balancer with its own idea of an answer": (
        "GCPBackendPolicy",
        "llm",
        lambda body: body["spec"]["targetRef"].update(name="other"),
        "the load balancer would cut every answer of llm-gateways after 30 s",
    ),
    "state that goes with its pod": (
        "StatefulSet",
        "llm-redis",
        lambda body: body["spec"].pop("volumeClaimTemplates"),
        "spec.volumeClaimTemplates: missing: with the pod everything that Ray's head knows would "
        "be lost",
    ),
    "state that is not written": (
        "StatefulSet",
        "llm-redis",
        lambda body: container_of(body).update(
            command=["redis-server", "--requirepass", "$(REDIS_PASSWORD)"]
        ),
        "spec.template.spec.containers[0].command: what was written last would be lost with the "
        "pod",
    ),
    "state without a password": (
        "StatefulSet",
        "llm-redis",
        lambda body: container_of(body).update(command=["redis-server", "--appendonly yes"]),
        "spec.template.spec.containers[0].command: Redis would ask nobody for a password",
    ),
    "two states": (
        "StatefulSet",
        "llm-redis",
        lambda body: body["spec"].update(replicas=2),
        "spec.replicas: several would each have a state of their own (value 2); allowed: 1",
    ),
    "state that everybody reaches": (
        "NetworkPolicy",
        "llm-redis",
        lambda body: body["spec"]["podSelector"]["matchLabels"].update(
            {"app.kubernetes.io/name": "slicewise"}
        ),
        "no NetworkPolicy selects it: every pod of the cluster could reach it",
    ),
    "Service of Redis": (
        "Service",
        "llm-redis",
        lambda body: body["spec"]["ports"][0].update(port=6380),
        "allowed: llm-redis.serving.svc:6380, or an address outside the namespace",
    ),
    "rights": (
        "Role",
        "llm-slice-provisioner",
        lambda body: body["rules"][1].update(verbs=["list", "watch"]),
        "the slice provisioner may not patch rayclusters",
    ),
    "rights of the node reader": (
        "ClusterRole",
        "serving-llm-node-reader",
        lambda body: body["rules"][0].update(verbs=["list"]),
        "the node reader may not watch nodes",
    ),
    "rights to what lies in no namespace": (
        "ClusterRole",
        "serving-llm-slice-provisioner",
        lambda body: body["rules"][0].update(verbs=["list"]),
        "the slice provisioner may not watch computeclasses",
    ),
    "claims": (
        "ResourceClaimTemplate",
        "all-netdev",
        lambda body: body["metadata"].update(name="some-netdev"),
        "resourceClaims: there is no ResourceClaimTemplate of this name "
        '(value "all-netdev"); allowed: some-netdev',
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_changed_object_is_refused(case: str) -> None:
    kind, name, change, words = ELSEWHERE[case]
    problems = found(changed(kind, name, change))
    assert any(words in each for each in problems), problems
