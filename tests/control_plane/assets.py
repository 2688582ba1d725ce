"""Where the binaries and the CRDs are that these tests need; and what is said where they are not.

Binaries go by the convention of controller-runtime's envtest: a folder named by KUBEBUILDER_ASSETS.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "KUBEBUILDER_ASSETS"
# What takes objects and keeps them; envtest brings no more than these.
BINARIES = ("etcd", "kube-apiserver")
# What acts on them: controllers, the scheduler, and KWOK in the place of every kubelet.
ACTING = ("kube-controller-manager", "kube-scheduler", "kwok")
# Of what `slicewise render` makes.
CRD_FILES = (
    "computeclass/cloud.google.com_computeclasses.yaml",
    "gateway-api/gateway.networking.k8s.io_gateways.yaml",
    "gateway-api/gateway.networking.k8s.io_httproutes.yaml",
    "gke-gateway/networking.gke.io_gcpbackendpolicies.yaml",
    "gke-gateway/networking.gke.io_healthcheckpolicies.yaml",
    "kuberay/ray.io_rayclusters.v1.7.0.yaml",
    "kuberay/ray.io_rayjobs.v1.7.0.yaml",
    "kuberay/ray.io_rayservices.v1.7.0.yaml",
    "prometheus-operator/monitoring.coreos.com_podmonitors.yaml",
)
_HOW = (
    "`setup-envtest use 1.34 -p path` says a folder that has etcd and kube-apiserver, releases of "
    "Kubernetes and KWOK bring the others; `make test` finds an archive of ours with all of them "
    "by itself (CONTRIBUTING.md)"
)


def missing_binaries(environment: Mapping[str, str], names: Sequence[str] = BINARIES) -> str | None:
    """What is missing of `names` and how to get it; `None` if everything is there."""
    folder = environment.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no folder with {' and '.join(names)}: {_HOW}"
    missing = [name for name in names if not os.access(Path(folder) / name, os.X_OK)]
    if missing:
        return f"{VARIABLE}={folder} lacks {' and '.join(missing)}: {_HOW}"
    return None


def missing_crds(folder: Path) -> str | None:
    """The same of the CRDs."""
    missing = [name for name in CRD_FILES if not (folder / name).is_file()]
    if missing:
        return f"these CRDs are not beside this repository: {', '.join(missing)}"
    return None
