"""Where the binaries and the CRDs are that these tests need; and what is said where they are not.

Binaries go by the convention of controller-runtime's envtest: a folder named by KUBEBUILDER_ASSETS.
"""

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "KUBEBUILDER_ASSETS"
BINARIES = ("etcd", "kube-apiserver")
# Of what `slicewise render` makes. RayJobs it does not.
CRD_FILES = (
    "computeclass/cloud.google.com_computeclasses.yaml",
    "gateway-api/gateway.networking.k8s.io_gateways.yaml",
    "gateway-api/gateway.networking.k8s.io_httproutes.yaml",
    "gke-gateway/networking.gke.io_gcpbackendpolicies.yaml",
    "gke-gateway/networking.gke.io_healthcheckpolicies.yaml",
    "kuberay/ray.io_rayclusters.v1.7.0.yaml",
    "kuberay/ray.io_rayservices.v1.7.0.yaml",
    "prometheus-operator/monitoring.coreos.com_podmonitors.yaml",
)
_HOW = (
    "`setup-envtest use 1.34 -p path` says a folder that has them; `make test` finds an archive of "
    "ours by itself (CONTRIBUTING.md)"
)


def missing_binaries(environment: Mapping[str, str]) -> str | None:
    """What is missing and how to get it; `None` if everything is there."""
    folder = environment.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no folder with {' and '.join(BINARIES)}: {_HOW}"
    missing = [name for name in BINARIES if not os.access(Path(folder) / name, os.X_OK)]
    if missing:
        return f"{VARIABLE}={folder} lacks {' and '.join(missing)}: {_HOW}"
    return None


def missing_crds(folder: Path) -> str | None:
    """The same of the CRDs."""
    missing = [name for name in CRD_FILES if not (folder / name).is_file()]
    if missing:
        return f"these CRDs are not beside this repository: {', '.join(missing)}"
    return None
