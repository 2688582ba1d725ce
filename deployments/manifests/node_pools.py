"""The script that makes node pools by hand, for those who do not let GKE make them. Pure.

Its commands follow Google's reference of gcloud; none of them has been run.
"""

import shlex
from collections.abc import Sequence

from deployments.manifests.compute_classes import NETWORK_PROFILE, node_pool_names, workload_policy
from deployments.manifests.slice_groups import SliceGroup, shape_name
from serving.domain.compute_class import MAX_FLEX_START_RUN_S, Market
from serving.domain.gke_names import GKE_COMPUTE_CLASS

_HEAD = """\
# CLUSTER and LOCATION are the GKE cluster's. A slice of several hosts is one whole node pool; it is
# made empty and filled and emptied at once.
set -eu
: "${CLUSTER:?the GKE cluster}" "${LOCATION:?its region or zone}"
"""


# On nodes with this label GKE runs its driver for network claims. Source: its page on managed
# DRANET, read 2026-11-22.
_NETWORK_DRIVER_LABEL = "cloud.google.com/gke-networking-dra-driver=true"


def node_pools_script(groups: Sequence[SliceGroup], *, has_claims: bool) -> str:
    """Writes one command for each pool; `has_claims`: pods claim their host's interfaces."""
    commands = [
        _command(pool, group, has_claims=has_claims)
        for group in groups
        for pool in node_pool_names(group)
    ]
    return _HEAD + "".join(f"{command}\n" for command in commands)


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


def _command(pool: str, group: SliceGroup, *, has_claims: bool) -> str:
    shape = group.shape
    labels = [f"{GKE_COMPUTE_CLASS}={group.name}", *([_NETWORK_DRIVER_LABEL] * has_claims)]
    most = shape.num_hosts if shape.num_hosts > 1 else group.terms.max_slices
    options = [
        f"--machine-type={shape.gke_machine_type}",
        f"--node-locations={','.join(group.zones)}",
        "--num-nodes=0",
        "--enable-autoscaling",
        "--total-min-nodes=0",
        f"--total-max-nodes={most}",
        f"--node-labels={','.join(labels)}",
        f"--node-taints={GKE_COMPUTE_CLASS}={group.name}:NoSchedule",
        "--workload-metadata=GKE_METADATA",
        *([f"--tpu-topology={shape.topology}"] if shape.num_hosts > 1 else []),
        *([f"--accelerator-network-profile={NETWORK_PROFILE}"] if has_claims else []),
        *_market_options(group),
    ]
    policy = workload_policy(group)
    if policy is not None:
        options.append(f"--placement-policy={policy}")
    words = " ".join(shlex.quote(option) for option in options)
    return (
        f'gcloud container node-pools create {pool} --cluster="$CLUSTER" '
        f'--location="$LOCATION" {words}'
    )


def _market_options(group: SliceGroup) -> list[str]:
    match group.market:
        case Market.RESERVED:
            if group.reservation is None:
                return ["--reservation-affinity=any"]
            return ["--reservation-affinity=specific", f"--reservation={group.reservation}"]
        case Market.SPOT:
            return ["--spot"]
        case Market.FLEX_START:
            longest_s = int(group.terms.max_run_s or MAX_FLEX_START_RUN_S)
            return ["--flex-start", f"--max-run-duration={longest_s}s"]
        case Market.ON_DEMAND:
            return []
