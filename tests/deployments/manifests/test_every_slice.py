"""Every generation, topology and compute class there is, rendered and held against everything.

What a manifest must say is computed here from the topology string alone, not by the product. All
are rendered in the everyday loop; checks and schemas, which take longer, go over a few of each
generation there, and over all in the long tests.
"""

import itertools
import math

import pytest

from deployments.validation.documents import Folder, mapping
from deployments.validation.schemas import Schemas
from serving.domain.topology import Generation, SliceShape, shapes

from .examples import found, in_memory, markets_of, one, raw_values

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}


def _few(generation: Generation) -> list[SliceShape]:
    """One slice of each size of host and of each way to be put together: one host, several."""
    kinds = itertools.groupby(
        sorted(shapes(generation), key=_kind_of_slice),
        key=_kind_of_slice,
    )
    return [next(members) for _, members in kinds]


def _kind_of_slice(shape: SliceShape) -> tuple[int, bool]:
    return shape.chips_per_host, shape.num_hosts > 1


FEW = [shape for generation in Generation for shape in _few(generation)]


def _id(shape: SliceShape) -> str:
    return f"{shape.generation}-{shape.topology}-{shape.chips_per_host}t"


def _in_every_market(shape: SliceShape) -> Folder:
    return in_memory(raw_values(*((shape, market) for market in markets_of(shape))))


@pytest.mark.parametrize("shape", FEW, ids=_id)
def test_checks_take_slices_of_every_kind(shape: SliceShape) -> None:
    assert found(_in_every_market(shape)) == []


@pytest.mark.long
@pytest.mark.parametrize("generation", Generation)
def test_checks_take_every_slice(generation: Generation) -> None:
    for shape in shapes(generation):
        assert found(_in_every_market(shape)) == [], shape


@pytest.mark.parametrize("shape", FEW, ids=_id)
def test_schemas_of_kuberay_and_gke_take_slices_of_every_kind(
    shape: SliceShape, crds: Schemas
) -> None:
    _assert_schemas_take(shape, crds)


@pytest.mark.long
@pytest.mark.parametrize("generation", Generation)
def test_schemas_of_kuberay_and_gke_take_every_slice(generation: Generation, crds: Schemas) -> None:
    for shape in shapes(generation):
        _assert_schemas_take(shape, crds)


def _assert_schemas_take(shape: SliceShape, crds: Schemas) -> None:
    folder = _in_every_market(shape)
    held = [*folder.of_kind("ComputeClass"), one(folder, "RayService")]
    assert all(crds.has(each) for each in held)
    problems = [str(problem) for each in held for problem in crds.problems(each)]
    assert problems == [], shape


@pytest.mark.parametrize("generation", Generation)
def test_slices_of_every_class_say_what_their_topology_means(generation: Generation) -> None:
    for shape in shapes(generation):
        _assert_agrees_with_topology(shape)


def _assert_agrees_with_topology(shape: SliceShape) -> None:
    folder = _in_every_market(shape)
    dimensions = [int(length) for length in shape.topology.split("x")]
    groups = one(folder, "RayService").body["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    off_slices = {"gateway", "control"}
    of_slices = {each["groupName"]: each for each in groups if each["groupName"] not in off_slices}
    classes = {
        each.name: each.body["spec"]["priorities"] for each in folder.of_kind("ComputeClass")
    }
    assert len(of_slices) == len(markets_of(shape))
    for name, group in of_slices.items():
        container = group["template"]["spec"]["containers"][0]
        chips = int(container["resources"]["requests"]["google.com/tpu"])
        selector = group["template"]["spec"]["nodeSelector"]
        (rule,) = classes[name]
        assert group["numOfHosts"] * chips == math.prod(dimensions), shape
        assert selector["cloud.google.com/gke-tpu-topology"] == shape.topology
        assert selector["cloud.google.com/gke-tpu-accelerator"] == ACCELERATORS[shape.generation]
        assert rule["tpu"] == {
            "type": ACCELERATORS[shape.generation],
            "count": chips,
            "topology": shape.topology,
        }
        assert rule["machineType"].endswith(f"-{chips}t"), shape


def test_markets_are_told_apart_by_what_gke_goes_by() -> None:
    shape = shapes("v6e")[0]
    folder = _in_every_market(shape)
    rules = {
        each.name: mapping(each.body, "spec", "priorities", 0)
        for each in folder.of_kind("ComputeClass")
    }
    assert rules["v6e-1x1-reserved"]["reservations"] == {
        "affinity": "Specific",
        "specific": [{"name": "ours", "zones": ["us-east5-b"]}],
    }
    assert "location" not in rules["v6e-1x1-reserved"]
    assert rules["v6e-1x1-spot"]["spot"] is True
    assert rules["v6e-1x1-flex-start"]["flexStart"]["enabled"] is True
    assert rules["v6e-1x1-flex-start"]["maxRunDurationSeconds"] == 7 * 24 * 3600
    assert rules["v6e-1x1-on-demand"]["spot"] is False


def test_combined_class_descends_from_what_is_paid_for_to_list_price() -> None:
    ladder = one(_in_every_market(shapes("v5p")[1]), "ComputeClass", "v5p-2x2x2-cost-optimised")
    rules = ladder.body["spec"]["priorities"]
    assert ["reservations" in rule for rule in rules] == [True, False, False, False]
    assert [bool(rule.get("spot")) for rule in rules] == [False, True, False, False]
    assert ["flexStart" in rule for rule in rules] == [False, False, True, False]


def test_combined_class_follows_prices_where_all_are_given() -> None:
    shape = shapes("v6e")[0]
    raw = raw_values((shape, "spot"), (shape, "flex-start"))
    raw["applications"][0]["args"]["compute_classes"] = [
        {"name": "spot", "market": "spot", "usd_per_chip_hour": 1.78},
        {"name": "flex-start", "market": "flex-start", "usd_per_chip_hour": 1.35},
    ]
    ladder = one(in_memory(raw), "ComputeClass", "v6e-1x1-cost-optimised")
    rules = ladder.body["spec"]["priorities"]
    assert ["flexStart" in rule for rule in rules] == [True, False]


def test_tpu7x_slices_of_several_hosts_have_their_workload_policy() -> None:
    several, single = shapes("tpu7x")[1], shapes("tpu7x")[0]
    folder = in_memory(raw_values((several, "spot"), (single, "spot")))
    rule = one(folder, "ComputeClass", "tpu7x-2x2x2-spot").body["spec"]["priorities"][0]
    assert rule["placement"] == {"policyName": "slicewise-tpu7x-2x2x2"}
    assert rule["storage"]["bootDiskType"] == "hyperdisk-balanced"
    rule = one(folder, "ComputeClass", "tpu7x-2x2x1-spot").body["spec"]["priorities"][0]
    assert "placement" not in rule


@pytest.mark.parametrize(
    ("notice_s", "critical_s"), [(None, 15), (15.0, 15), (105.0, 15), (110.0, 10), (120.0, 0)]
)
def test_spot_nodes_leave_pods_the_whole_drain(notice_s: float | None, critical_s: int) -> None:
    is_longer = notice_s is not None and notice_s > 15
    relied_on_s = 120 if is_longer else 30
    raw = raw_values((shapes("v6e")[0], "spot"), spot_shutdown_s=relied_on_s)
    if notice_s is not None:
        declared = {"name": "spot", "market": "spot", "drain_notice_s": notice_s}
        raw["applications"][0]["args"]["compute_classes"] = [declared]
    folder = in_memory(raw)
    if is_longer:
        # The same drain, where nobody relies on the time for it.
        unsure = in_memory(raw | {"cluster": raw["cluster"] | {"spot_shutdown_s": 30}})
        words = f"told sooner than compute class spot drains, which takes {notice_s:g} s"
        problems = found(unsure)
        assert problems
        assert all(words in problem for problem in problems)
    kubelet = one(folder, "ComputeClass", "v6e-1x1-spot").body["spec"]["priorities"][0][
        "nodeSystemConfig"
    ]["kubeletConfig"]
    assert kubelet == {
        "shutdownGracePeriodSeconds": 120,
        "shutdownGracePeriodCriticalPodsSeconds": critical_s,
    }
    assert found(folder) == []
