"""The CRDs that manifests are held against, where they are at hand."""

import pytest

from deployments.validation.schemas import Schemas, read_schemas
from tests.needs import CRDS, do_without, missing

_FILES = (
    "kuberay/ray.io_rayservices.v1.7.0.yaml",
    "kuberay/ray.io_rayclusters.v1.7.0.yaml",
    "kuberay/ray.io_rayjobs.v1.7.0.yaml",
    "computeclass/cloud.google.com_computeclasses.yaml",
)


@pytest.fixture(scope="session")
def crds() -> Schemas:
    """KubeRay 1.7's and GKE's own."""
    if reason := missing("crds"):
        do_without(reason)
    return read_schemas(CRDS / name for name in _FILES)
