"""What the pods of a slice show to be wrong with it. The first rule that holds decides. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deployments.status.cluster.pods import PodReading
from deployments.status.findings.finding import FleetFinding, Severity, age_s, runbook, short
from deployments.status.findings.slice_cases import SliceCase
from serving.domain.supply.pods import PodPhase


@dataclass(frozen=True, slots=True)
class PodScene:
    """What the rules look at besides the slice itself.

    `machines` are the TPU hosts and whether each is ready; `None` where that is not known. What has
    lasted for less than `patience_s` is still on its way.
    """

    namespace: str
    machines: Mapping[str, bool] | None
    now_s: float
    patience_s: float

    def look_at(self, pod: PodReading) -> str:
        """Returns the command that shows a pod."""
        return f"kubectl -n {self.namespace} describe pod {pod.name}"


PodRule = Callable[[SliceCase, PodScene], FleetFinding | None]


def stuck_terminating(case: SliceCase, scene: PodScene) -> FleetFinding | None:
    """A pod that should be gone, and is not: its machine is paid for, and nothing replaces it."""
    for pod in case.pods or ():
        late_s = age_s(pod.due_at_s, scene.now_s)
        if late_s is None or late_s < scene.patience_s:
            continue
        what = f"its pod {pod.name} should have ended and is still there"
        action = (
            "its machine does not answer any more: kubectl "
            f"-n {scene.namespace} delete pod {pod.name} --force --grace-period=0"
        )
        if pod.finalizers:
            what += f"; finalizers hold it: {', '.join(pod.finalizers)}"
            action = (
                "have their owner let go; once that is away for good: kubectl "
                f"-n {scene.namespace} patch pod {pod.name} --type=merge "
                """-p '{"metadata":{"finalizers":null}}'"""
            )
        return FleetFinding(Severity.WARNING, f"slice {case.name}", what, action, late_s)
    return None


def ended(case: SliceCase, scene: PodScene) -> FleetFinding | None:
    """A pod that has ended: the slice is of no use any more."""
    for pod in case.staying:
        if pod.phase not in (PodPhase.FAILED, PodPhase.SUCCEEDED):
            continue
        why = f": {short(pod.reason)}" if pod.reason else ""
        return FleetFinding(
            Severity.WARNING,
            f"slice {case.name}",
            f"its pod {pod.name} has ended ({pod.phase}{why})",
            f"the provisioner has it replaced; if it stays: {runbook('ProvisionerFailing')}; "
            f"why it ended: {scene.look_at(pod)}",
            age_s(pod.since_s, scene.now_s),
        )
    return None


def half(case: SliceCase, _scene: PodScene) -> FleetFinding | None:
    """Hosts without a pod, while other hosts of the slice have theirs."""
    pods = case.staying
    if not pods or case.num_hosts is None or len(pods) >= case.num_hosts:
        return None
    there = {pod.place.worker_id for pod in pods if pod.place is not None}
    missing = [number for number in range(case.num_hosts) if number not in there]
    what = f"{len(pods)} of its {case.num_hosts} pods {'is' if len(pods) == 1 else 'are'} there"
    what += f", none of host {', '.join(map(str, missing))}: no engine can run on it"
    listed = [host for host in (case.record.hosts if case.record else ()) if host.node_id]
    still = [host for host in listed if host.worker_id in missing]
    if still:
        what += f"; Ray still lists the node of host {still[0].worker_id}"
    return FleetFinding(
        Severity.WARNING,
        f"slice {case.name}",
        what,
        "the KubeRay operator makes the whole slice anew within a minute; if it does not: "
        f"{runbook('SlicesNotCreated')}",
    )


def machine_gone(case: SliceCase, scene: PodScene) -> FleetFinding | None:
    """A pod on a machine that is gone or silent, which Kubernetes has not noticed yet."""
    if scene.machines is None:
        return None
    for pod in case.staying:
        if pod.machine is None or scene.machines.get(pod.machine):
            continue
        is_gone = pod.machine not in scene.machines
        state = "is gone" if is_gone else "is not ready: its kubelet does not answer"
        action = f"kubectl describe node {pod.machine}"
        if is_gone:
            action = (
                "Kubernetes takes the pod away within a minute, and the slice is replaced; "
                f"sooner: kubectl -n {scene.namespace} delete pod {pod.name} --force"
            )
        return FleetFinding(
            Severity.WARNING,
            f"slice {case.name}",
            f"machine {pod.machine} under its pod {pod.name} {state}",
            action,
        )
    return None


def hindered(case: SliceCase, scene: PodScene) -> FleetFinding | None:
    """A container that cannot start, on a machine that is paid for."""
    for pod in case.staying:
        if pod.waiting is not None:
            return FleetFinding(
                Severity.WARNING,
                f"slice {case.name}",
                f"a container of its pod {pod.name} cannot start: {short(pod.waiting)}",
                f"{scene.look_at(pod)}; {runbook('SlicePodsCannotStart')}",
                age_s(pod.since_s, scene.now_s),
            )
    return None


def waits_for_machine(case: SliceCase, scene: PodScene) -> FleetFinding | None:
    """A pod that has had no machine for too long."""
    for pod in case.staying:
        waited_s = age_s(pod.since_s, scene.now_s)
        if pod.machine is not None or waited_s is None or waited_s < scene.patience_s:
            continue
        why = f": {short(pod.unschedulable)}" if pod.unschedulable else ""
        return FleetFinding(
            Severity.WARNING,
            f"slice {case.name}",
            f"its pod {pod.name} has no machine{why}",
            f"{scene.look_at(pod)}; {runbook('SlicePodsPending')}",
            waited_s,
        )
    return None


def not_joined(case: SliceCase, scene: PodScene) -> FleetFinding | None:
    """Pods that are ready, while Ray knows no node of theirs: chips are paid for in vain."""
    if not case.is_reported:
        return None
    joined = {host.pod for host in (case.record.hosts if case.record else ()) if host.node_id}
    for pod in case.staying:
        ready_s = age_s(pod.since_s, scene.now_s) or 0.0
        if case.record is not None and case.record.state == "booting":
            # It may have been in Ray until then.
            ready_s = min(ready_s, case.record.since_s)
        if not pod.is_ready or pod.name in joined or ready_s < scene.patience_s:
            continue
        return FleetFinding(
            Severity.WARNING,
            f"slice {case.name}",
            f"its pod {pod.name} is ready, and Ray has no node of it: its chips are paid for "
            "and of no use",
            f"kubectl -n {scene.namespace} logs {pod.name} --all-containers --tail=50; then "
            f"slicewise order condemn {case.order_name}",
            ready_s,
        )
    return None


POD_RULES: tuple[PodRule, ...] = (
    stuck_terminating,
    ended,
    half,
    machine_gone,
    hindered,
    waits_for_machine,
    not_joined,
)


def first_of_pods(
    case: SliceCase, scene: PodScene, rules: Iterable[PodRule] = POD_RULES
) -> FleetFinding | None:
    """Returns what the pods of a slice show first; `None` if nothing."""
    return next((found for rule in rules if (found := rule(case, scene)) is not None), None)
