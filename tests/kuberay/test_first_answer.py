"""The shipped example from nothing, with one class out of stock, on the control plane.

`slicewise render` of `deployments/values/example.yaml`: its RayService, with what stands around it,
has a cluster without slices. Reserved and spot slices come, flex-start ones never do. The operator
deploys what stands in the RayService, changed as `installed` says. Gateways' pods are no Ray nodes:
who answers their readiness probe, and the request that their Service lets through, is the one
gateway on the head of this machine.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from control_plane.server import ControlPlane

from deployments.manifests.names import GATEWAY_GROUP
from serving.domain.tokens.paced import LETTERS, paced_tokens
from tests.deployments.manifests.examples import shipped
from tests.e2e.application import linked_engines

from .objects import RAYSERVICE
from .serving_cluster import ServingCluster
from .status import is_ready
from .webhook_server import Webhook

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Json = dict[str, Any]

RESERVED, SPOT, FLEX = "v6e-2x2-reserved", "v6e-2x2-spot", "v6e-2x2-flex-start"
MODEL = "qwen3-8b"
PROMPT = list(b"Is anybody there?")
NUM_TOKENS = 8
START_S = 240.0


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane, webhook: Webhook) -> Iterator[ServingCluster]:
    """Out of stock everywhere, until a test says otherwise."""
    delays: dict[str, float | None] = {RESERVED: None, SPOT: None, FLEX: None}
    pace = {"ttft_ms": 20.0, "tpot_ms": 20.0}
    with ServingCluster(control_plane, shipped("example.yaml"), delays, pace) as running:
        yield running


def gateway_pods(cluster: ServingCluster) -> list[Json]:
    return cluster.pods(GATEWAY_GROUP)


def ready_addresses(cluster: ServingCluster) -> list[str]:
    """Where the Service of the gateways sends requests, as the API server's endpoints have it."""
    labels = {"kubernetes.io/service-name": f"{RAYSERVICE}-gateways"}
    endpoints = [
        each
        for found in cluster.kubernetes.list("EndpointSlice", cluster.namespace, labels)
        for each in found.get("endpoints") or ()
    ]
    return sorted(
        address
        for each in endpoints
        if each["conditions"]["ready"]
        for address in each["addresses"]
    )


def said_by_ready(cluster: ServingCluster) -> tuple[int, str]:
    """What the gateway answers to `/ready`; 0 where nobody answers."""
    try:
        answer = httpx.get(f"{cluster.application.base_url}/ready", timeout=5, verify=False)
    except httpx.HTTPError as error:
        return 0, repr(error)
    return answer.status_code, answer.text


def answer(cluster: ServingCluster) -> Json:
    """A whole answer."""
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answered = httpx.post(
        f"{cluster.application.base_url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {cluster.application.api_key}"},
        timeout=60,
        verify=False,
    )
    found: Json = answered.raise_for_status().json()
    return found


def waiting_classes(cluster: ServingCluster) -> set[str]:
    """The compute classes of replicas that wait for a slice."""
    rows = cluster.application.fleet()["slices"]
    return {row["compute_class"] for row in rows if row["state"] == "provisioning"}


def test_first_answer_comes_with_the_first_slice_while_another_class_waits(
    cluster: ServingCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    nobody = "no engine has been ready yet: 4 wanted at least; slice replicas: 4 provisioning"

    def nobody_is_ready() -> bool:
        status, words = said_by_ready(cluster)
        return status == 503 and nobody in words

    cluster.wait(nobody_is_ready, "a gateway says that there is no engine", START_S)
    up_s = time.monotonic() - began_s
    # Every class has been asked for, and none has come.
    cluster.wait(
        lambda: [len(cluster.pods(group)) for group in (RESERVED, SPOT, FLEX)] == [1, 2, 1],
        "each class is asked for what its replicas want",
    )
    assert len(gateway_pods(cluster)) == 2
    assert not any(is_ready(pod) for pod in gateway_pods(cluster))
    assert ready_addresses(cluster) == []

    cluster.cloud.delays_s[RESERVED] = 0.0
    ready_s = cluster.wait(lambda: bool(ready_addresses(cluster)), "the Service leads to gateways")
    (choice,) = answer(cluster)["choices"]
    answered_s = time.monotonic() - began_s - up_s
    assert choice["token_ids"] == paced_tokens(PROMPT, NUM_TOKENS, LETTERS)
    fleet = cluster.application.fleet()
    assert linked_engines(fleet) == {MODEL: 1}
    assert waiting_classes(cluster) == {"spot", "flex-start"}
    # Whoever waited for KubeRay would still wait.
    status = cluster.rayservice()["status"]
    assert "rayClusterName" not in status["activeServiceStatus"]
    applications = status["pendingServiceStatus"]["applicationStatuses"]
    assert applications["slicewise"]["status"] == "DEPLOYING"
    addresses = sorted(pod["status"]["podIP"] for pod in gateway_pods(cluster))
    cluster.wait(lambda: ready_addresses(cluster) == addresses, "every gateway is behind it")

    cluster.cloud.delays_s[SPOT] = 0.0
    cluster.application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 3}, START_S)
    assert waiting_classes(cluster) == {"flex-start"}
    counts = {name: cluster.group(name)["replicas"] for name in (RESERVED, SPOT, FLEX)}
    assert counts == {RESERVED: 1, SPOT: 2, FLEX: 1}
    with capsys.disabled():
        sys.stdout.write(
            f"\n    a gateway answers after {up_s:.0f} s; the first slice in stock: its engine is "
            f"ready and the Service leads to gateways after {ready_s:.1f} s, first answer after "
            f"{answered_s:.1f} s, two classes waiting; every slice that comes serves after "
            f"{time.monotonic() - began_s:.0f} s\n"
        )
