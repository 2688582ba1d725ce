"""What a simulated cluster's file may say, and what its hosts look like to Ray."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.util.tpu import get_tpu_worker_resources

from deployments.simulation.plan import (
    SimulationPlan,
    host_environment,
    host_labels,
    host_resources,
    parse_plan,
)
from serving.domain.errors import ConfigError
from serving.domain.inventory import SliceRequest, observe_hosts
from serving.domain.supply.found import find_slices, match_slices

SHIPPED = Path(__file__).resolve().parents[3] / "deployments" / "sim" / "cluster.yaml"
SPOT = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "4x4"}


def plan(*kinds: dict[str, Any]) -> SimulationPlan:
    return parse_plan({"slices": [SPOT | kind for kind in kinds]})


def test_shipped_plan_is_two_spot_slices_a_reserved_one_and_a_later_flex_start() -> None:
    shipped = parse_plan(yaml.safe_load(SHIPPED.read_text()))
    assert [(kind.compute_class, kind.count) for kind in shipped.slices] == [
        ("spot", 2),
        ("reserved", 1),
        ("flex-start", 1),
    ]
    assert [kind.appears_after_s > 0 for kind in shipped.slices] == [False, False, True]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "slices"),
        ({"slices": []}, "slices"),
        ({"slices": [SPOT | {"topology": "3x3"}]}, "slices[0].topology"),
        ({"slices": [SPOT | {"generation": "v9"}]}, "slices[0].topology"),
        ({"slices": [SPOT, SPOT]}, "slices[1].name: given twice"),
        ({"slices": [SPOT | {"colour": "red"}]}, "slices.0.colour"),
        ({"slices": [SPOT | {"name": "Spot"}]}, "slices.0.name"),
        ({"slices": [SPOT | {"chips_per_host": 0}]}, "slices.0.chips_per_host"),
    ],
)
def test_plan_that_makes_no_sense_is_refused_by_field(raw: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_plan(raw)
    assert words in str(refused.value)


def test_hosts_are_what_a_replica_looks_for() -> None:
    kind = plan({"chips_per_host": 4, "topology": "2x4"}).slices[0]
    nodes = [
        {
            "NodeID": f"n{worker_id}",
            "Alive": True,
            "NodeManagerAddress": "127.0.0.1",
            "Resources": host_resources(kind, "spot-0", worker_id),
            "Labels": host_labels(kind, "spot-0", worker_id),
        }
        for worker_id in range(2)
    ]
    available = {str(node["NodeID"]): {"TPU": 4.0} for node in nodes}
    want = SliceRequest("spot", "v6e-8", "2x4", 2, 4, {"ray.io/market-type": "spot"})
    found = match_slices(find_slices(observe_hosts(nodes, available, ())), want)
    assert [each.name for each in found.free] == ["spot-0"]


def test_hosts_have_the_chips_that_ray_reserves() -> None:
    kind = plan({}).slices[0]
    num_hosts, resources = get_tpu_worker_resources("4x4", "v6e")
    assert num_hosts == kind.shape.num_hosts
    assert host_resources(kind, "spot-0", 1)["TPU"] == resources["TPU"]
    assert "TPU-v6e-16-head" in host_resources(kind, "spot-0", 0)
    assert "TPU-v6e-16-head" not in host_resources(kind, "spot-0", 1)
    assert host_environment(kind, "spot-0", 1)["TPU_WORKER_ID"] == "1"


def test_market_is_the_compute_class_unless_said() -> None:
    ours, named = plan({}, {"name": "gke", "compute_class": "v6e-cheap", "market": "spot"}).slices
    assert host_labels(ours, "spot-0", 0)["ray.io/market-type"] == "spot"
    assert host_labels(named, "gke-0", 0)["ray.io/market-type"] == "spot"
    assert host_labels(named, "gke-0", 0)["slicewise.io/compute-class"] == "v6e-cheap"
