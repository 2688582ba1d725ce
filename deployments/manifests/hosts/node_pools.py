"""The script that makes node pools by hand, for those who do not let GKE make them. Pure.

Its commands follow Google's reference of gcloud; none of them has been run.
"""

import shlex
from collections.abc import Sequence

from deployments.manifests.cluster_config import ClusterConfig
from deployments.manifests.compute_classes import NETWORK_PROFILE, node_pool_names, workload_policy
from deployments.manifests.hosts.disk import boot_disk_type, local_ssds
from deployments.manifests.hosts.kernel import node_pool_config
from deployments.manifests.slice_groups import SliceGroup, shape_name
from serving.domain.compute_class import MAX_FLEX_START_RUN_S, Market
from serving.domain.names.gke_names import GKE_COMPUTE_CLASS

_HEAD = """\
# CLUSTER and LOCATION are the GKE cluster's. A slice of several hosts is one whole node pool; it is
# made empty and filled and emptied at once.
set -eu
: "${CLUSTER:?the GKE cluster}" "${LOCATION:?its region or zone}"
"""


# On nodes with this label GKE runs its driver for network claims. Source: its page on managed
# DRANET, read 2026-11-22.
_NETWORK_DRIVER_LABEL = "cloud.google.com/gke-networking-dra-driver=true"


def node_pools_script(
    cluster: ClusterConfig, groups: Sequence[SliceGroup], *, has_claims: bool
) -> str:
    """Writes one command for each pool; `has_claims`: pods claim their host's interfaces."""
    lines = []
    for group in groups:
        config = node_pool_config(cluster, group)
        if config:
            lines += ['config="$(mktemp)"', f"printf '%s' {shlex.quote(config)} > \"$config\""]
        lines += [
            _command(cluster, pool, at, group, has_claims=has_claims, has_config=bool(config))
            for at, pool in enumerate(node_pool_names(group))
        ]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def workload_policies_script(groups: Sequence[SliceGroup]) -> str:
    """Returns one command for each shape that needs a policy; "" if none does."""
    commands = {}
    for group in groups:
        policy = workload_policy(group)
        if policy is not None:
            commands[shape_name(group.shape)] = (
                f"gcloud compute resource-policies create workload-policy {policy} "
                f"--type=HIGH_THROUGHPUT --accelerator-topology={group.shape.topology} "
                '--region="$REGION"\n'
            )
    if not commands:
        return ""
    head = 'set -eu\n: "${REGION:?the region of the slices}"\n'
    return head + "".join(commands[name] for name in sorted(commands))


def _command(
    cluster: ClusterConfig,
    pool: str,
    at: int,
    group: SliceGroup,
    *,
    has_claims: bool,
    has_config: bool,
) -> str:
    shape, disk = group.shape, cluster.host.boot_disk
    labels = [f"{GKE_COMPUTE_CLASS}={group.name}", *([_NETWORK_DRIVER_LABEL] * has_claims)]
    most = shape.num_hosts if shape.num_hosts > 1 else group.terms.max_slices
    # A slice is in one zone: of several, each pool of a slice has the next.
    zones = group.zones if shape.num_hosts == 1 else (group.zones[at % len(group.zones)],)
    ssds = local_ssds(cluster.host)
    options = [
        f"--machine-type={shape.gke_machine_type}",
        f"--node-locations={','.join(zones)}",
        f"--disk-type={boot_disk_type(cluster.host, shape.generation)}",
        f"--disk-size={disk.size_gb}",
        "--num-nodes=0",
        "--enable-autoscaling",
        "--total-min-nodes=0",
        f"--total-max-nodes={most}",
        f"--node-labels={','.join(labels)}",
        f"--node-taints={GKE_COMPUTE_CLASS}={group.name}:NoSchedule",
        "--workload-metadata=GKE_METADATA",
        *([] if ssds is None else [f"--ephemeral-storage-local-ssd=count={ssds}"]),
        *([f"--tpu-topology={shape.topology}"] if shape.num_hosts > 1 else []),
        *([f"--accelerator-network-profile={NETWORK_PROFILE}"] if has_claims else []),
        *_market_options(group),
    ]
    policy = workload_policy(group)
    if policy is not None:
        options.append(f"--placement-policy={policy}")
    words = " ".join(shlex.quote(option) for option in options)
    words += ' --system-config-from-file="$config"' * has_config
    return (
        f'gcloud container node-pools create {pool} --cluster="$CLUSTER" '
        f'--location="$LOCATION" {words}'
    )


def _market_options(group: SliceGroup) -> list[str]:
    match group.market:
        case Market.RESERVED:
            if group.reservation is None:
                return ["--reservation-affinity=any"]
            name = group.reservation
            if group.reservation_project is not None:
                # Source: xpk at 02b0c092, whose recorded commands name a shared one so; read
                # 2026-11-23.
                name = f"projects/{group.reservation_project}/reservations/{name}"
            return ["--reservation-affinity=specific", f"--reservation={name}"]
        case Market.SPOT:
            return ["--spot"]
        case Market.FLEX_START:
            longest_s = int(group.terms.max_run_s or MAX_FLEX_START_RUN_S)
            return ["--flex-start", f"--max-run-duration={longest_s}s"]
        case Market.ON_DEMAND:
            return []
