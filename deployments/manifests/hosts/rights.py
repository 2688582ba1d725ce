"""The rights of Ray's container on a TPU host. Pure.

Sources, read 2026-11-23, and they conflict. *For more rights*: Google's page on custom containers
on Vertex AI says that the limit of locked memory must be raised, and names GKE's page on TPUs
(section "privileged mode"), as Hugging Face's TPU images do with `ulimit -l 68719476736`;
upstream's tests run privileged; Google's image for Ray on TPUs is root's. *For none*: tpu-recipes'
manifests for v6e and TPU7x add nothing; a comment with measurements on ray-project/ray#65105
(2026-07-30) shows every device of a pod on v6e as `crw-rw-rw- root`, so that any user may open it.
Which holds for locked memory nobody says, and too little of it stops every slice; so the default
has more.
"""

from deployments.manifests.hosts.config import HostConfig, HostUser
from deployments.manifests.names import Json
from serving.tpu.host.locked_memory import UNLIMITED

ROOT = 0
# To lock more memory than the limit says, and to raise limits.
ROOT_CAPABILITIES = ("IPC_LOCK", "SYS_RESOURCE")


def capabilities_of(rights: HostUser) -> tuple[str, ...]:
    """Returns the capabilities that are added."""
    if rights.capabilities is not None:
        return rights.capabilities
    return ROOT_CAPABILITIES if rights.user == ROOT and not rights.privileged else ()


def host_pod_security(host: HostConfig, group: int) -> Json:
    """Returns the security context of a host's pod; `group` owns its volumes."""
    return {
        "fsGroup": group,
        "runAsNonRoot": host.rights.user != ROOT,
        "runAsUser": host.rights.user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def host_container_security(host: HostConfig) -> Json:
    """Returns the security context of Ray's container on a host."""
    if host.rights.privileged:
        return {"privileged": True}
    added = capabilities_of(host.rights)
    capabilities: Json = {"drop": ["ALL"]} | ({"add": list(added)} if added else {})
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def memlock_text(host: HostConfig) -> str:
    """Returns the value of `MEMLOCK_VARIABLE`: bytes, or `unlimited`."""
    gib = host.rights.memlock_gib
    return UNLIMITED if gib is None else str(gib * 1024**3)
