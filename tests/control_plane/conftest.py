"""What the tests of this folder share, besides the control plane (`tests/conftest.py`)."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kuberay.listed import listing

from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from deployments.manifests.values import Values

from .api import Api
from .proxy import Proxy
from .ray_objects import CLUSTER, made_namespace, make_cluster, make_service, service_account
from .server import ControlPlane
from .watching import may_list, until

Json = dict[str, Any]


@pytest.fixture
def api(control_plane: ControlPlane) -> Api:
    """A cluster administrator's."""
    return control_plane.api


@pytest.fixture
def namespace(api: Api) -> Iterator[Values]:
    """A namespace of the test's own, with our rights in it; the values it was rendered from."""
    with made_namespace(api) as found:
        yield found


@pytest.fixture
def service(api: Api, namespace: Values) -> Json:
    """Our RayService in it."""
    return make_service(api, namespace)


@pytest.fixture
def cluster(api: Api, service: Json) -> Json:
    """Its RayCluster, without pods."""
    return make_cluster(api, service)


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[Proxy]:
    """A way to the server that can be spoiled."""
    with Proxy(control_plane) as running:
        yield running


@pytest.fixture
async def access(
    control_plane: ControlPlane, proxy: Proxy, namespace: Values, tmp_path: Path
) -> KubernetesAccess:
    """As the head pod's service account, through the proxy."""
    name = namespace.cluster.namespace
    token = tmp_path / "token"
    account = service_account(namespace.cluster)
    token.write_text(control_plane.api.request_token(name, account))
    found = KubernetesAccess(proxy.url, name, token, proxy.ca_file)
    api = KubernetesApi(found)
    await until(lambda: may_list(api), lambda: "the account may list pods")
    await api.aclose()
    proxy.forget_requests()
    return found


@pytest.fixture
async def listed(
    control_plane: ControlPlane, namespace: Values, tmp_path: Path
) -> AsyncIterator[KubeRayProvisioner]:
    """An administrator's, who asks the server itself, and everything anew at each look."""
    token = tmp_path / "admin-token"
    token.write_text((control_plane.folder / "tokens.csv").read_text().split(",")[0])
    name = namespace.cluster.namespace
    api = KubernetesApi(KubernetesAccess(control_plane.url, name, token, control_plane.ca_file))
    yield listing(api, CLUSTER)
    await api.aclose()
