"""Our configuration of HAProxy, made of what Ray Serve's own code writes."""

import re
from pathlib import Path

import pytest

from deployments.start.ingress.configuration import (
    IngressLimits,
    UnknownConfigurationError,
    connections_for,
    own_configuration,
)
from deployments.start.ingress.haproxy import HEADER_TIMEOUT, MAX_CONNECTIONS, limits_of

from .rendered_by_ray import write_as_ray_does

LIMITS = IngressLimits(max_connections=1600, header_timeout_s=7, idle_timeout_s=90)


@pytest.fixture
def written(tmp_path: Path) -> str:
    return write_as_ray_does(tmp_path, 8000, [9001, 9002]).read_text()


def changed_lines(before: str, after: str) -> tuple[set[str], set[str]]:
    """What is gone and what is new, line by line."""
    old, new = set(before.splitlines()), set(after.splitlines())
    return old - new, new - old


def test_only_the_lines_that_are_ours_change(written: str, tmp_path: Path) -> None:
    gone, new = changed_lines(written, own_configuration(written, LIMITS))
    assert gone == {
        f"    stats socket {tmp_path}/admin mode 666 level admin expose-fd listeners",
        "    maxconn 4096",
        "    hard-stop-after 2s",
        "    option splice-request",
        "    timeout client 3600s",
        "    bind :19101",
        "  bind *:18404",
    }
    refusal = {line for line in new if "track-sc0" in line or "sc_conn_cur(0) gt 1500" in line}
    assert len(refusal) == 2
    assert new - refusal == {
        f"    stats socket {tmp_path}/admin mode 600 level admin expose-fd listeners",
        "    maxconn 1600",
        "    stick-table type integer size 1 store conn_cur",
        "    http-request del-header x-request-timeout-seconds",
        "    http-request set-header x-request-disconnect-disabled ?1",
        "    timeout client 90s",
        "    timeout http-request 7s",
        "    bind 127.0.0.1:19101",
        "  bind 127.0.0.1:18404",
    }


def test_refusal_comes_behind_health_checks_and_before_any_gateway(written: str) -> None:
    lines = own_configuration(written, LIMITS).splitlines()
    (refusal,) = (at for at, line in enumerate(lines) if "sc_conn_cur" in line)
    health = max(at for at, line in enumerate(lines) if line.endswith("if healthcheck"))
    (to_gateways,) = (at for at, line in enumerate(lines) if "use_backend http-default" in line)
    assert health < refusal < to_gateways


@pytest.mark.parametrize(
    "line",
    [
        "    maxconn 4096\n",
        "    timeout client 3600s\n",
        "    bind :19101\n",
        "  bind *:18404\n",
        "    # Per-backend path ACLs",
        "defaults\n",
        "listen stats\n",
        " mode 666",
    ],
)
def test_configuration_of_another_ray_is_refused_and_the_line_is_named(
    written: str, line: str
) -> None:
    assert line in written
    with pytest.raises(UnknownConfigurationError) as caught:
        own_configuration(written.replace(line, ""), LIMITS)
    assert re.search(r"section `[a-z_ ]+`", str(caught.value))
    with pytest.raises(UnknownConfigurationError):
        own_configuration(own_configuration(written, LIMITS), LIMITS)


@pytest.mark.parametrize(
    ("num_descriptors", "wanted", "held"),
    [(1_048_576, 16_384, 16_384), (20_000, 16_384, 7_920), (1024, 16_384, 329), (50, 16, 1)],
)
def test_connections_are_what_descriptors_allow(
    num_descriptors: int, wanted: int, held: int
) -> None:
    assert connections_for(num_descriptors, wanted) == held


def test_limits_are_read_from_variables_and_a_wrong_one_is_named() -> None:
    limits = limits_of({MAX_CONNECTIONS: "100", HEADER_TIMEOUT: "3"}, 20_000)
    assert (limits.max_connections, limits.header_timeout_s, limits.num_served) == (100, 3, 92)
    for text in ("0", "-1", "ten", "1.5"):
        with pytest.raises(ValueError, match=f"{HEADER_TIMEOUT}: not usable .value '{text}'"):
            limits_of({HEADER_TIMEOUT: text}, 20_000)
