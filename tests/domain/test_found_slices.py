"""Which slices are whole and free, read from nodes as Ray lists them."""

from typing import Any

import pytest

from serving.domain.inventory import (
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    TOPOLOGY_LABEL,
    WORKER_ID_LABEL,
    SliceRequest,
    observe_hosts,
)
from serving.domain.supply.found import SliceMatches, find_slices, match_slices

WANT = SliceRequest("spot", "v6e-8", "2x4", 2, 4, {"ray.io/market-type": "spot"})


def node(name: str | None, worker_id: int, **changes: Any) -> dict[str, Any]:
    """A live host of a v6e 2x4 spot slice as `ray.nodes()` has it."""
    labels = {
        POD_TYPE_LABEL: "v6e-8",
        TOPOLOGY_LABEL: "2x4",
        WORKER_ID_LABEL: str(worker_id),
        "ray.io/market-type": "spot",
    }
    if name is not None:
        labels[SLICE_NAME_LABEL] = name
    return {
        "NodeID": changes.pop("node_id", f"{name}/{worker_id}"),
        "Alive": changes.pop("alive", True),
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"TPU": changes.pop("chips", 4.0), "CPU": 2.0},
        "Labels": labels | changes,
    }


def whole(name: str) -> list[dict[str, Any]]:
    return [node(name, 1), node(name, 0)]


def look(
    nodes: list[dict[str, Any]],
    *,
    taken: tuple[str, ...] = (),
    draining: tuple[str, ...] = (),
    request: SliceRequest = WANT,
) -> SliceMatches:
    available = {
        each["NodeID"]: {"TPU": 4.0, "CPU": 2.0} if each["NodeID"] not in taken else {"CPU": 1.0}
        for each in nodes
    }
    return match_slices(find_slices(observe_hosts(nodes, available, draining)), request)


def test_whole_free_slice_is_found_with_its_hosts_in_order() -> None:
    found = look(whole("spot-0"))
    assert [each.name for each in found.free] == ["spot-0"]
    assert [host.worker_id for host in found.free[0].hosts] == [0, 1]
    assert found.free[0].node_ids == {"spot-0/0", "spot-0/1"}


@pytest.mark.parametrize(
    ("nodes", "options", "reason"),
    [
        ([node("s", 0)], {}, "host 1 of 2 is missing"),
        ([node("s", 0), node("s", 1, alive=False)], {}, "host 1 of 2 is missing"),
        (whole("s"), {"taken": ("s/1",)}, "it is taken"),
        (whole("s"), {"draining": ("s/0",)}, "host 0 drains"),
        ([*whole("s"), node("s", 1, node_id="new")], {}, "two hosts have one worker id"),
        ([*whole("s"), node("s", 2)], {}, "it has 3 hosts, not 2"),
        ([node("s", 0), node("s", 1, chips=8.0)], {}, "host 1 has 8 chips, not 4"),
        ([node("s", 0), node("s", 1, **{WORKER_ID_LABEL: "x"})], {}, "host 1 of 2 is missing"),
    ],
)
def test_slice_that_is_not_whole_or_not_free_is_refused_with_the_reason(
    nodes: list[dict[str, Any]], options: dict[str, Any], reason: str
) -> None:
    found = look(nodes, **options)
    assert found.free == ()
    assert reason in found.refused["s"]


@pytest.mark.parametrize(
    "other",
    [
        {"ray.io/market-type": "on-demand"},
        {POD_TYPE_LABEL: "v5p-8"},
        {TOPOLOGY_LABEL: "4x4"},
    ],
)
def test_slice_of_another_kind_is_no_candidate_at_all(other: dict[str, str]) -> None:
    found = look([node("s", 0, **other), node("s", 1, **other)])
    assert (found.free, dict(found.refused)) == ((), {})


def test_single_host_slice_needs_no_name() -> None:
    request = SliceRequest("spot", "v6e-8", "2x4", 1, 8, {})
    nodes = [node(None, 0, node_id="a" * 56, chips=8.0), node(None, 0, node_id="b" * 56, chips=8.0)]
    available = {each["NodeID"]: {"TPU": 8.0} for each in nodes}
    found = match_slices(find_slices(observe_hosts(nodes, available, ())), request)
    assert [each.name for each in found.free] == ["node-aaaaaaaaaaaa", "node-bbbbbbbbbbbb"]


@pytest.mark.parametrize("worker_ids", [(0, 1), (0, 0), (1, 1), (1, 2)])
def test_single_hosts_that_were_told_one_name_are_a_slice_each(worker_ids: tuple[int, int]) -> None:
    request = SliceRequest("spot", "v6e-8", "2x4", 1, 8, {})
    nodes = [
        node("g-2", worker_id, node_id=letter * 56, chips=8.0)
        for worker_id, letter in zip(worker_ids, "ab", strict=True)
    ]
    available = {each["NodeID"]: {"TPU": 8.0} for each in nodes}
    found = match_slices(find_slices(observe_hosts(nodes, available, ())), request)
    assert dict(found.refused) == {}
    assert len({each.name for each in found.free}) == 2
    assert [[host.worker_id for host in each.hosts] for each in found.free] == [[0], [0]]
    # Whoever is told apart by its node keeps its name when the other one goes.
    if worker_ids == (0, 1):
        assert [each.name for each in found.free] == ["g-2", "g-2-bbbbbbbbbbbb"]


def test_replacement_under_the_same_name_is_another_slice() -> None:
    before = look(whole("s")).free[0]
    after = look([node("s", 0, node_id="new-0"), node("s", 1, node_id="new-1")]).free[0]
    assert before.name == after.name
    assert not before.node_ids & after.node_ids
