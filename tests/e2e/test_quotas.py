"""A tenant's quota over two gateways, of which one dies, and the directory that adds them up."""

import contextlib
import time
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .answers import ANSWER_TIMEOUT_S
from .application import Role, RunningApplication
from .conftest import QUOTA_KEY, QUOTA_REQUESTS
from .test_gateway_kill import own_ports

pytestmark = [pytest.mark.e2e]

BODY = {"model": "paced", "prompt": "a", "max_tokens": 2}
# A process that dies is seen, and another one starts; a gateway imports vLLM.
RESTART_S = 150.0


def ask(application: RunningApplication) -> httpx.Response:
    headers = {"Authorization": f"Bearer {QUOTA_KEY}"}
    url = f"{application.base_url}/v1/completions"
    return httpx.post(url, json=BODY, headers=headers, timeout=ANSWER_TIMEOUT_S, verify=False)


def wait_known(application: RunningApplication, number: int) -> None:
    """Waits until each of the gateways knows that so many requests are used."""

    def known(fleet: dict[str, Any]) -> int | None:
        (quota,) = [each for each in fleet["quotas"] if each["tenant"] == "limited"]
        return int(quota["used"]) if quota["used"] >= number else None

    assert set(application.at_each_gateway(2, known, RESTART_S).values()) == {number}


def told_by_gateways(application: RunningApplication, name: str) -> list[float]:
    """A series of the tenant's quota on each gateway's own page."""
    found = []
    headers = {"Authorization": f"Bearer {application.api_key}"}
    for port in own_ports(application):
        with contextlib.suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{port}/metrics"
            page = httpx.get(url, headers=headers, trust_env=False).raise_for_status()
            found += [
                sample.value
                for family in text_string_to_metric_families(page.text)
                for sample in family.samples
                if sample.name == f"slicewise_tenant_quota_{name}"
                and sample.labels.get("tenant", "limited") == "limited"
            ]
    return found


def wait_replaced(application: RunningApplication, role: Role, before: psutil.Process) -> None:
    deadline_s = time.monotonic() + RESTART_S
    while before.pid in {each.pid for each in application.processes(role)} or not (
        application.processes(role)
    ):
        assert time.monotonic() < deadline_s, f"no other {role}"
        time.sleep(0.1)


def test_a_quota_holds_over_gateways_and_outlives_these_and_the_directory(
    operated_application: RunningApplication,
) -> None:
    application = operated_application
    application.loads(2)
    for number in range(QUOTA_REQUESTS):
        assert ask(application).status_code == 200
        wait_known(application, number + 1)
    refused = [ask(application) for _ in range(4)]
    assert {answer.status_code for answer in refused} == {429}
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert refused[0].headers["x-ratelimit-remaining-requests"] == "0"
    assert int(refused[0].headers["retry-after"]) > 3600
    assert told_by_gateways(application, "used") == [QUOTA_REQUESTS] * 2
    assert told_by_gateways(application, "limit") == [QUOTA_REQUESTS] * 2
    assert sum(told_by_gateways(application, "refusals_total")) == 4
    assert max(told_by_gateways(application, "answer_age_seconds")) < RESTART_S

    gateway = application.processes(Role.GATEWAY)[0]
    gateway.kill()
    wait_replaced(application, Role.GATEWAY, gateway)
    wait_known(application, QUOTA_REQUESTS)

    # What it adds up is written every 5 s.
    directory = application.processes(Role.DIRECTORY)[0]
    directory.kill()
    wait_replaced(application, Role.DIRECTORY, directory)
    gateway = application.processes(Role.GATEWAY)[0]
    gateway.kill()
    wait_replaced(application, Role.GATEWAY, gateway)
    wait_known(application, QUOTA_REQUESTS)
    assert {ask(application).status_code for _ in range(4)} == {429}
