"""What raylets are told, read from recorded pods; and what is said of pods that tell nothing."""

from typing import Any

import pytest

from autoscaling.provisioning.raycluster import GROUP_LABEL, NODE_TYPE_LABEL

from .play import recorded, recorded_scenarios
from .quantities import cores, in_gibibytes, num_bytes
from .start_command import start_parameters, variables_of
from .webhook import has_chips

Json = dict[str, Any]


@pytest.mark.parametrize("scenario", recorded_scenarios())
def test_recorded_workers_are_told_the_labels_and_chips_of_their_group(scenario: str) -> None:
    moment = recorded(scenario).moments[-1]
    clusters = {each["metadata"]["name"]: each for each in moment["rayclusters"]}
    hosts = [pod for pod in moment["pods"] if has_chips(pod)]
    assert hosts
    for pod in hosts:
        labels = pod["metadata"]["labels"]
        spec = clusters[labels["ray.io/cluster"]]["spec"]
        (group,) = (
            each for each in spec["workerGroupSpecs"] if each["groupName"] == labels[GROUP_LABEL]
        )
        container = group["template"]["spec"]["containers"][0]
        chips = int(container["resources"]["limits"]["google.com/tpu"])
        assert start_parameters(pod) == (group["labels"], {"TPU": chips})


def test_variables_are_filled_in_from_the_pod() -> None:
    moment = recorded("07-multi-host-slices").moments[0]
    pod = next(each for each in moment["pods"] if has_chips(each))
    pod = pod | {"status": pod["status"] | {"hostIP": "10.0.0.7"}}
    variables = variables_of(pod)
    assert variables["RAY_CLOUD_INSTANCE_ID"] == pod["metadata"]["name"]
    assert variables["RAY_NODE_TYPE_NAME"] == pod["metadata"]["labels"][GROUP_LABEL]
    assert variables["NODE_IP"] == "10.0.0.7"
    assert "HF_TOKEN" not in variables


def test_pod_that_starts_no_ray_is_refused_by_name() -> None:
    pod = {"metadata": {"name": "other"}, "spec": {"containers": [{"args": ["sleep 1"]}]}}
    with pytest.raises(ValueError, match="args='sleep 1' of other"):
        start_parameters(pod)


def test_heads_say_that_they_are_heads() -> None:
    (head,) = (
        pod
        for pod in recorded("12-raycluster-flavour").moments[0]["pods"]
        if pod["metadata"]["labels"][NODE_TYPE_LABEL] == "head"
    )
    assert start_parameters(head) == ({}, {})


@pytest.mark.parametrize(
    ("text", "value"), [("4", 4), ("500m", 0.5), ("16Gi", 16 * 1024**3), ("1k", 1000)]
)
def test_quantity_is_read(text: str, value: float) -> None:
    assert float(cores(text)) == value


def test_sum_is_written_in_the_largest_whole_unit() -> None:
    assert in_gibibytes(num_bytes("16Gi") * 11) == "176Gi"
    assert in_gibibytes(num_bytes("512Mi") * 3) == "1536Mi"
    assert in_gibibytes(0) == "0"


def test_quantity_of_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="'4 cores' is no quantity"):
        cores("4 cores")
