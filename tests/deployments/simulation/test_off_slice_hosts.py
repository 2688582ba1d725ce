"""Hosts without chips: what cannot be asked of them; `tests/disasters` starts and ends some."""

import pytest

from deployments.simulation.control_plane import ControlPlane, HeadGoneError
from deployments.simulation.off_slice_hosts import OffSliceHosts, UnknownHostError
from deployments.simulation.plan import parse_plan

SPOT = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}


@pytest.fixture
def hosts() -> OffSliceHosts:
    """Of a cluster that has not been started."""
    return OffSliceHosts(ControlPlane(0, 0), parse_plan({"slices": [SPOT]}))


def test_unknown_role_is_refused_with_those_there_are(hosts: OffSliceHosts) -> None:
    with pytest.raises(UnknownHostError, match=r"'head' is unknown \(allowed: gateway, control\)"):
        hosts.add("head")


def test_unknown_host_is_refused_with_those_there_are(hosts: OffSliceHosts) -> None:
    with pytest.raises(UnknownHostError, match=r"'control-0' is unknown \(allowed: none\)"):
        hosts.kill("control-0")


def test_host_needs_a_head_to_join(hosts: OffSliceHosts) -> None:
    with pytest.raises(HeadGoneError):
        hosts.add("control")
    assert hosts.describe() == []
