"""The pods of control processes: how many there are, how large, what they are told."""

import shlex
from typing import Any

import pytest

from deployments.manifests.cluster_config import ControlPoolConfig
from deployments.manifests.control_pool import least_memory_gib, least_pods
from serving.app import _control_options, _gateway_options
from serving.domain.errors import ConfigError
from serving.domain.names.gke_names import CONTROL_ROLE, ROLE_LABEL
from serving.domain.topology import slice_shape

from .examples import Raw, found, in_memory, one, parsed, raw_values

SHAPE = slice_shape("v6e", "2x2")

Json = dict[str, Any]


def raw_of(engines: int, **pool: Any) -> Raw:
    """Values with so many engines, and this of `cluster.control_pool`."""
    classes = [{"compute_class": "spot", "max_slices": engines}]
    raw = raw_values((SHAPE, "spot"), classes=classes, control_pool=pool)
    (deployment,) = raw["applications"][0]["args"]["models"][0]["deployments"]
    deployment["replicas"] = engines
    return raw


def groups_of(raw: Raw) -> dict[str, Json]:
    spec = one(in_memory(raw), "RayCluster").body["spec"]
    return {each["groupName"]: each for each in spec["workerGroupSpecs"]}


@pytest.mark.parametrize(
    ("processes", "cpus", "pods"),
    [(1, 1, 2), (20, 1, 2), (21, 1, 3), (200, 1, 11), (200, 4, 4), (1, 16, 2)],
)
def test_there_is_room_for_all_while_one_pod_is_away(processes: int, cpus: int, pods: int) -> None:
    assert least_pods(processes, cpus) == pods


def test_pool_grows_with_the_engines_unless_it_is_given() -> None:
    # With the directory and the dashboard.
    assert groups_of(raw_of(18))["control"]["replicas"] == 2
    assert groups_of(raw_of(19))["control"]["replicas"] == 3
    given = groups_of(raw_of(19, cpus=2, memory_gib=8, pods=5))["control"]
    assert [given[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [5, 5, 5]
    limits = given["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("2", "8Gi")
    assert found(in_memory(raw_of(19, cpus=2, memory_gib=8, pods=5))) == []


def test_default_memory_is_enough_for_the_default_cpus() -> None:
    pool = ControlPoolConfig()
    assert least_memory_gib(pool) <= pool.memory_gib


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (
            {"pods": 2},
            "cluster.control_pool.pods: too few for 42 control processes while one pod is away: "
            "each takes 20 (value 2); allowed: at least 4, or more cpus",
        ),
        (
            {"memory_gib": 3},
            "cluster.control_pool.memory_gib: too little for the 20 processes of a pod (value 3); "
            "allowed: at least 4, or fewer cpus",
        ),
        ({"pods": 1}, "cluster.control_pool.pods: not allowed (value 1)"),
    ],
)
def test_pool_that_is_too_small_is_refused(pool: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(raw_of(40, **pool))
    assert any(words in str(each) for each in refused.value.problems), refused.value


def test_nodes_of_the_pool_have_the_label_by_which_control_processes_find_them() -> None:
    raw = raw_of(1)
    app = parsed(raw).app
    groups = groups_of(raw)
    assert groups["control"]["labels"] == {ROLE_LABEL: CONTROL_ROLE}
    assert "labels" not in groups["gateway"]
    control, gateway = _control_options(app), _gateway_options(app)
    assert control["label_selector"][ROLE_LABEL] == CONTROL_ROLE
    # Where there is no such node, any without chips.
    (otherwise,) = control["fallback_strategy"]
    rest = dict(control["label_selector"])
    del rest[ROLE_LABEL]
    assert otherwise == {"label_selector": rest}
    assert gateway["label_selector"] == rest | {ROLE_LABEL: f"!{CONTROL_ROLE}"}


def test_gateway_waits_for_all_control_nodes_but_one() -> None:
    spec = groups_of(raw_of(40))["gateway"]["template"]["spec"]
    (container,) = spec["initContainers"]
    words = shlex.split(container["command"][-1])
    at = words.index("deployments.start.control_nodes")
    assert words[at + 1 : at + 3] == ["$RAYCLUSTER-head-svc:6379", "3"]
    names = {each["name"] for each in container["env"]}
    assert {"RAYCLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names
