"""The one control plane of a process of tests, with the CRDs in it: it takes seconds to start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from deployments.validation.documents import LOADER
from tests.needs import CRDS, do_without

from .api import Api
from .assets import ACTING, BINARIES, CRD_FILES, VARIABLE, missing_binaries, missing_crds
from .server import ControlPlane


@contextmanager
def shared_control_plane() -> Iterator[ControlPlane]:
    """Runs with everything that acts; about 0.7 GiB. Skips or fails where something is missing."""
    reason = missing_binaries(os.environ, (*BINARIES, *ACTING)) or missing_crds(CRDS)
    if reason is not None:
        do_without(reason)
    with ControlPlane(Path(os.environ[VARIABLE]), ACTING) as running:
        define_crds(running.api)
        yield running


def define_crds(api: Api) -> None:
    """Defines all kinds that our manifests have."""
    for name in CRD_FILES:
        for crd in yaml.load_all((CRDS / name).read_text(), Loader=LOADER):
            if crd is not None:
                api.define(crd)
