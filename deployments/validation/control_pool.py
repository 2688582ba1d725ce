"""Checks that control processes have enough pods of their own, and time to hand over. Pure."""

from collections.abc import Iterator

from deployments.manifests.control_pool import least_pods
from deployments.validation.documents import Folder, KubernetesManifest, ray_clusters, value_at
from deployments.validation.found_pods import FoundPod, ray_pods
from deployments.validation.serving import application_of, end_problems
from serving.config.application import AppConfig, processes_per_node
from serving.config.slice_settings import longest_replica_stop_s
from serving.domain.errors import Problem
from serving.domain.names.gke_names import CONTROL_ROLE, ROLE_LABEL


def control_pool_problems(folder: Folder) -> Iterator[Problem]:
    """Checks every Ray cluster whose application can be read."""
    pods = list(ray_pods(folder))
    for manifest, path, _ in ray_clusters(folder):
        app = application_of(folder, manifest)
        if app is None:
            continue
        own = [pod for pod in pods if pod.manifest is manifest and pod.is_control]
        if not own:
            complaint = "no group for control processes: they would be on the gateways' pods"
            required = f"required: a group with the label {ROLE_LABEL}={CONTROL_ROLE}"
            yield manifest.problem(f"{path}.workerGroupSpecs", complaint, required)
            continue
        yield from _room_problems(manifest, own, app)
        for pod in own:
            words = "what Serve gives a replica to end: engines would be left without one"
            yield from end_problems(pod, longest_replica_stop_s(app), words)


def _room_problems(
    manifest: KubernetesManifest, pods: list[FoundPod], app: AppConfig
) -> Iterator[Problem]:
    """Yields a group with too few pods; of several groups it says nothing."""
    if len(pods) > 1:
        return
    (pod,) = pods
    cpus = value_at(pod.spec, "containers", 0, "resources", "limits", "cpu")
    count = value_at(pod.group, "replicas")
    field = pod.path.removesuffix(".template")
    if not str(cpus).isdecimal() or str(cpus) == "0":
        where = f"{pod.path}.spec.containers[0].resources.limits.cpu"
        complaint = "Ray takes its number of control processes from it"
        yield manifest.problem(where, complaint, "allowed: a whole number, 1 or more", cpus)
        return
    least = least_pods(app.num_control_processes, int(str(cpus)))
    if not isinstance(count, int) or count < least:
        complaint = (
            f"too few for {app.num_control_processes} control processes while one pod is away: "
            f"each takes {processes_per_node(int(str(cpus)))}"
        )
        yield manifest.problem(f"{field}.replicas", complaint, f"allowed: at least {least}", count)
