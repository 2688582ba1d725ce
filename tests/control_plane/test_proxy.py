"""The proxy before the API server: what it keeps, and what it spoils."""

import json
import ssl
from collections.abc import Iterator

import httpx
import pytest

from .api import Api, reference, wait
from .proxy import Fault, Proxy
from .server import ControlPlane

pytestmark = pytest.mark.process

NAMESPACE = "proxied"
MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"


@pytest.fixture
def proxy(control_plane: ControlPlane, api: Api) -> Iterator[Proxy]:
    api.apply(reference("Namespace", None, NAMESPACE))
    wait(lambda: api.find("ServiceAccount", NAMESPACE, "default"), "its account is there")
    with Proxy(control_plane, page_size=1) as running:
        yield running


@pytest.fixture
def client(control_plane: ControlPlane, api: Api, proxy: Proxy) -> Iterator[httpx.Client]:
    """Of the namespace's own account, which may read what is in it."""
    binding = reference("RoleBinding", NAMESPACE, "readers")
    binding["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "edit",
    }
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}
    api.apply(binding | {"subjects": [subject]})
    token = api.request_token(NAMESPACE, "default")
    proxy.know("reader", token)
    verify = ssl.create_default_context(cafile=str(proxy.ca_file))
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=proxy.url, verify=verify, headers=headers) as speaking:
        wait(lambda: speaking.get(MAPS).is_success, "it may read")
        yield speaking


def test_requests_are_kept_with_who_made_them_and_what_came_of_it(
    client: httpx.Client, proxy: Proxy
) -> None:
    client.get(f"{MAPS}/kube-root-ca.crt")
    client.get("/api/v1/namespaces/kube-system/configmaps")
    kept, refused = proxy.requests("reader")[-2:]
    assert (kept.verb, kept.resource, kept.name, kept.status) == (
        "get",
        "configmaps",
        "kube-root-ca.crt",
        200,
    )
    assert (refused.verb, refused.status) == ("list", 403)


def test_fault_is_given_once_and_the_request_does_not_land(
    client: httpx.Client, proxy: Proxy
) -> None:
    proxy.inject(Fault("delete", 429, retry_after_s=7))
    answer = client.delete(f"{MAPS}/kube-root-ca.crt")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert client.get(f"{MAPS}/kube-root-ca.crt").status_code == 200


def test_fault_that_lands_is_an_answer_that_was_lost(
    client: httpx.Client, proxy: Proxy, api: Api
) -> None:
    api.create(reference("ConfigMap", NAMESPACE, "doomed"))
    proxy.inject(Fault("delete", 503, lands=True))
    assert client.delete(f"{MAPS}/doomed").status_code == 503
    assert api.find("ConfigMap", NAMESPACE, "doomed") is None


def test_pages_are_no_longer_than_it_says(client: httpx.Client, api: Api) -> None:
    api.apply(reference("ConfigMap", NAMESPACE, "another"))
    page = client.get(MAPS, params={"limit": "500"}).json()
    assert len(page["items"]) == 1
    assert page["metadata"]["continue"]


def test_watch_is_passed_on_as_it_comes(client: httpx.Client, api: Api) -> None:
    version = client.get(MAPS).json()["metadata"]["resourceVersion"]
    params = {"watch": "true", "resourceVersion": version}
    with client.stream("GET", MAPS, params=params) as answer:
        lines = answer.iter_lines()
        for name in ("one", "two"):
            api.create(reference("ConfigMap", NAMESPACE, f"watched-{name}"))
            event = json.loads(next(lines))
            assert (event["type"], event["object"]["metadata"]["name"]) == (
                "ADDED",
                f"watched-{name}",
            )


def test_bearer_of_a_certificate_is_let_in_by_the_token_of_its_name(
    client: httpx.Client, proxy: Proxy, control_plane: ControlPlane
) -> None:
    certificate, key = control_plane.authority.client("reader")
    context = ssl.create_default_context(cafile=str(proxy.ca_file))
    context.load_cert_chain(certificate, key)
    with httpx.Client(base_url=proxy.url, verify=context) as speaking:
        assert speaking.get(MAPS).is_success
    assert proxy.requests()[-1].user == "reader"


def test_caller_that_does_not_trust_its_authority_is_not_answered(proxy: Proxy) -> None:
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{proxy.url}{MAPS}")
