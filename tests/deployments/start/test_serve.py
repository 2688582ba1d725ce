"""The environment of a cluster on this machine."""

import json
from pathlib import Path

import pytest

from deployments.start.serve import child_environment
from deployments.start.tpu_host import ray_environment, ray_options
from serving.config.ray_settings import HARD_STOP, RAY_SETTINGS, RECONNECT
from serving.domain.compute_class import Market
from serving.domain.inventory import (
    SLICE_NAME_LABEL,
    WORKER_ID_LABEL,
    ObservedHost,
    SliceRequest,
)
from serving.domain.supply.found import find_slices, match_slices
from serving.domain.topology import slice_shape


def test_ports_last_for_a_gateway_killed_every_minute_until_haproxys_hard_stop(
    tmp_path: Path,
) -> None:
    environment = child_environment({}, str(tmp_path))
    first = int(environment["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"])
    end = int(environment["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"])
    # Serve keeps the port of an ended gateway back until 30 s after the hard stop.
    assert end - first > (int(environment[HARD_STOP]) + 30) / 60


def test_own_variables_win_over_ours_but_not_over_the_clusters_place(tmp_path: Path) -> None:
    inherited = {HARD_STOP: "300", "RAY_TMPDIR": "/elsewhere", "RAY_AUTH_MODE": "disabled"}
    environment = child_environment(inherited, str(tmp_path))
    assert (environment[HARD_STOP], environment["RAY_AUTH_MODE"]) == ("300", "disabled")
    assert environment["RAY_TMPDIR"] == str(tmp_path)


def test_another_clusters_token_is_not_this_ones(tmp_path: Path) -> None:
    theirs = {"RAY_AUTH_TOKEN": "theirs", "RAY_AUTH_TOKEN_PATH": "/theirs"}
    environment = child_environment(theirs, str(tmp_path))
    assert environment["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN" not in environment
    assert Path(environment["RAY_AUTH_TOKEN_PATH"]).parent == tmp_path


def test_environment_of_ray_on_a_vm_is_what_pods_have_and_what_is_set_stays() -> None:
    environment = ray_environment({"RAY_AUTH_MODE": "token", "OTHER": "1"})
    assert RAY_SETTINGS.items() <= environment.items()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment[RECONNECT] == "86400"
    assert "OTHER" not in environment


@pytest.mark.parametrize("worker", [0, 3])
def test_host_started_by_hand_is_one_that_a_replica_takes(worker: int) -> None:
    shape = slice_shape("v6e", "4x4")
    resources, labels = ray_options(shape, "mine", worker, Market.SPOT)
    found = json.loads(resources.removeprefix("--resources="))
    assert (found["TPU"], found["mine"]) == (4, 1)
    assert ("TPU-v6e-16-head" in found) == (worker == 0)
    pairs = dict(each.split("=") for each in labels.removeprefix("--labels=").split(","))
    hosts = [
        ObservedHost(
            node_id=f"{number}",
            address="",
            slice_name=pairs[SLICE_NAME_LABEL],
            worker_id=number,
            num_chips=4,
            num_free_chips=4,
            is_draining=False,
            labels={**pairs, WORKER_ID_LABEL: f"{number}"},
        )
        for number in range(4)
    ]
    request = SliceRequest(
        pod_type=shape.ray_pod_type,
        topology=shape.topology,
        num_hosts=4,
        chips_per_host=4,
        compute_class="spot",
        labels={"ray.io/market-type": "spot"},
    )
    assert [each.name for each in match_slices(find_slices(hosts), request).free] == ["mine"]
    # A shell takes each for one word.
    assert not any(" " in option for option in (resources, labels))


def test_host_that_the_slice_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slice has 4 hosts \(value 4\); allowed: 0 to 3"):
        ray_options(slice_shape("v6e", "4x4"), "mine", 4, Market.SPOT)
