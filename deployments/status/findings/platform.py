"""What is wrong with what slices stand on: head, gateways, Redis, quotas, classes. Pure."""

from collections.abc import Iterable, Iterator

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.sidecar.readings import CONTROL, GATEWAY, HEAD, REDIS, QuotaUse
from deployments.status.cluster.pods import PodReading
from deployments.status.cluster.reading import ClassReading, ClusterReading
from deployments.status.findings.finding import FleetFinding, Severity, age_s, runbook, short
from serving.domain.topology import slice_shape

_PAGES = {
    HEAD: "HeadDown",
    GATEWAY: "GatewaysMissing",
    CONTROL: "ControlPodsMissing",
    REDIS: "RedisDown",
}
_WORDS = {
    HEAD: "no slice is added, taken over or dropped; requests go on",
    GATEWAY: "the other gateways have its requests",
    CONTROL: "streams go on; its processes are on the others of its kind or beside the gateways",
    REDIS: "the head stands still, and a head that starts now waits for it",
}
_NAMES_OF_SEVERAL = {GATEWAY: "gateways", CONTROL: "control pods"}
_QUOTA_WORDS = "exceeded quota"
# With the names of cluster and pod, and what was asked of which quota.
_REFUSAL_LENGTH = 500
# So long after a restart it is still told.
_RESTART_TOLD_S = 3600.0


def platform_findings(
    cluster: ClusterReading, now_s: float, patience_s: float
) -> Iterator[FleetFinding]:
    """Yields what is wrong with control pods first, then with what makes slices."""
    if cluster.name is None:
        yield FleetFinding(
            Severity.CRITICAL,
            cluster.target,
            "it is not there, or has no cluster yet",
            f"kubectl -n {cluster.namespace} get rayservices,rayclusters",
        )
        return
    for component in (HEAD, GATEWAY, CONTROL, REDIS):
        pods = [pod for pod in cluster.pods if pod.component == component]
        yield from _control_findings(component, pods, cluster, now_s, patience_s)
    yield from _class_findings(cluster.classes or (), now_s)
    yield from _missing_slices(cluster, now_s)
    for note in cluster.notes:
        yield FleetFinding(
            Severity.NOTE,
            f"cluster {cluster.name}",
            note,
            f"kubectl -n {cluster.namespace} get raycluster {cluster.name} -o yaml",
        )
    for part, problem in cluster.problems.items():
        yield FleetFinding(
            Severity.NOTE,
            "kubectl",
            f"{part} could not be read, so nothing is said of them: {short(problem)}",
            f"kubectl auth can-i list {part} -n {cluster.namespace}",
        )


def _control_findings(
    component: str,
    pods: list[PodReading],
    cluster: ClusterReading,
    now_s: float,
    patience_s: float,
) -> Iterator[FleetFinding]:
    staying = [pod for pod in pods if pod.due_at_s is None]
    ready = [pod for pod in staying if pod.is_ready]
    wanted = cluster.wish.pods.get(component, 0) if cluster.wish is not None else 0
    missing = wanted - len(staying)
    if missing > 0:
        words = f"{missing} of {wanted} pods {'is' if missing == 1 else 'are'} not there"
        yield FleetFinding(
            _severity(component, ready),
            _NAMES_OF_SEVERAL.get(component, component) if wanted > 1 else component,
            f"{'its pod is not there' if wanted == 1 else words}: {_effect(component, ready)}",
            f"the KubeRay operator makes it; if it does not: {runbook(_PAGES[component])}",
        )
    for pod in staying:
        yield from _control_pod(component, pod, ready, cluster, now_s, patience_s)


def _severity(component: str, ready: list[PodReading]) -> Severity:
    """Returns how bad it is that a pod is away; control processes find another place."""
    return Severity.WARNING if ready or component == CONTROL else Severity.CRITICAL


def _effect(component: str, ready: list[PodReading]) -> str:
    """Returns what users and fleet feel of a control pod that is away."""
    if component == GATEWAY and not ready:
        return "no gateway is ready, so every request fails"
    return _WORDS[component]


def _control_pod(
    component: str,
    pod: PodReading,
    ready: list[PodReading],
    cluster: ClusterReading,
    now_s: float,
    patience_s: float,
) -> Iterator[FleetFinding]:
    """Yields what is wrong with one pod of the control plane: not ready, or back from an end."""
    action = f"kubectl -n {cluster.namespace} describe pod {pod.name}; {runbook(_PAGES[component])}"
    unready_s = age_s(pod.since_s, now_s)
    # It may be starting; but if it is the last, it is needed now.
    is_starting = bool(ready) and unready_s is not None and unready_s < patience_s
    if not pod.is_ready and not is_starting:
        why = pod.waiting or pod.unschedulable or pod.reason
        state = f"{pod.phase}: {short(why)}" if why else f"{pod.phase}"
        yield FleetFinding(
            _severity(component, ready),
            f"{component} {pod.name}",
            f"it is not ready ({state}): {_effect(component, ready)}",
            action,
            unready_s,
        )
    restart = pod.restart
    if pod.is_ready and restart is not None:
        ago_s = age_s(restart.at_s, now_s)
        # Long ago it has been looked at, or it was nothing.
        if ago_s is not None and ago_s < _RESTART_TOLD_S:
            times = "once" if restart.count == 1 else f"{restart.count} times"
            why = f", last ended as {restart.reason}" if restart.reason else ""
            yield FleetFinding(
                Severity.WARNING,
                f"{component} {pod.name}",
                f"its container {restart.container} has restarted {times}{why}",
                f"kubectl -n {cluster.namespace} logs {pod.name} -c {restart.container} --previous",
                ago_s,
            )


def _class_findings(classes: Iterable[ClassReading], now_s: float) -> Iterator[FleetFinding]:
    for each in classes:
        if not each.suspended:
            continue
        is_all = len(each.suspended) >= each.num_rules
        how_many = f"{len(each.suspended)} of its {each.num_rules} rules"
        if is_all:
            how_many = "its only rule" if each.num_rules == 1 else f"all its {each.num_rules} rules"
        since = [rule.since_s for rule in each.suspended if rule.since_s is not None]
        reasons = "; ".join(dict.fromkeys(short(rule.reason) for rule in each.suspended))
        yield FleetFinding(
            Severity.WARNING if is_all else Severity.NOTE,
            f"class {each.name}",
            f"GKE has suspended {how_many}"
            f"{' and makes no machines for it' if is_all else ''}: {reasons}",
            f"kubectl get computeclass {each.name} -o yaml; {runbook('ClassSuspended')}",
            age_s(min(since, default=None), now_s),
        )


def _missing_slices(cluster: ClusterReading, now_s: float) -> Iterator[FleetFinding]:
    """Yields the groups that are asked for more slices than they have pods for, and why."""
    for group in cluster.groups:
        # One of which a pod is missing is told by itself.
        missing = group.asked_for - len(group.slices)
        if missing <= 0:
            continue
        full = _full_quota(cluster.quotas or (), group)
        has = "has" if missing == 1 else "have"
        words = f"{missing} of {group.asked_for} slices that are asked for {has} no pods"
        refusal = next(
            (each for each in cluster.warnings or () if group.name in each.message), None
        )
        latest = refusal or next(iter(cluster.warnings or ()), None)
        if full is not None:
            yield FleetFinding(
                Severity.WARNING,
                f"group {group.name}",
                f"{words}: quota {full.quota} allows {full.hard:g} {full.resource}, and "
                f"{full.used:g} are used",
                f"kubectl -n {cluster.namespace} describe resourcequota {full.quota}; "
                f"{runbook('QuotaExhausted')}",
                None if latest is None else age_s(latest.at_s, now_s),
            )
            continue
        why = "" if latest is None else f": {short(latest.message, _REFUSAL_LENGTH)}"
        is_quota = latest is not None and _QUOTA_WORDS in latest.message
        yield FleetFinding(
            Severity.WARNING,
            f"group {group.name}",
            f"{words}{why}",
            runbook("QuotaExhausted" if is_quota else "SlicesNotCreated"),
            None if latest is None else age_s(latest.at_s, now_s),
        )


def _full_quota(quotas: Iterable[QuotaUse], group: WorkerGroup) -> QuotaUse | None:
    """Returns a quota that has no room for another slice of a group: of its chips or its pods."""
    for quota in quotas:
        if quota.used is None:
            continue
        needed = {
            "requests.google.com/tpu": _num_chips(group),
            "pods": group.num_hosts,
            "count/pods": group.num_hosts,
        }.get(quota.resource)
        if needed is not None and quota.used + needed > quota.hard:
            return quota
    return None


def _num_chips(group: WorkerGroup) -> int:
    return slice_shape(group.kind.generation, group.kind.topology).num_chips
