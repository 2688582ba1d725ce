"""One control plane for all tests of this folder, with the CRDs in it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deployments.validation.documents import LOADER
from tests.needs import CRDS, do_without

from .api import Api
from .assets import CRD_FILES, VARIABLE, missing_binaries, missing_crds
from .server import ControlPlane


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Runs; about 0.5 GiB."""
    reason = missing_binaries(os.environ) or missing_crds(CRDS)
    if reason is not None:
        do_without(reason)
    with ControlPlane(Path(os.environ[VARIABLE])) as running:
        for name in CRD_FILES:
            for crd in yaml.load_all((CRDS / name).read_text(), Loader=LOADER):
                if crd is not None:
                    running.api.define(crd)
        yield running


@pytest.fixture
def api(control_plane: ControlPlane) -> Api:
    """A cluster administrator's."""
    return control_plane.api
