"""What is carried into a RayCluster, taken by a real API server with KubeRay's schemas."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from autoscaling.provisioning.carry.compare import carry_over
from tests.autoscaling.applied_again import Applied, applied_again

from .api import Api, RefusedByServerError
from .test_manifests_are_taken import applied as on_the_server

pytestmark = pytest.mark.process

Json = dict[str, Any]
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "serving"}}
COUNTS = ("replicas", "scaleStrategy")


@pytest.fixture
def running(api: Api) -> Iterator[Applied]:
    """The recorded cluster and its RayService, as the server has them."""
    recorded = applied_again()
    del recorded.cluster["metadata"]["ownerReferences"]  # nobody here has the owner's uid
    with on_the_server(api, [NAMESPACE, recorded.service, recorded.cluster]) as made:
        yield Applied(made[1] | {"status": recorded.service["status"]}, made[2], recorded.pods)


def without_counts(spec: Json) -> Json:
    spec = copy.deepcopy(spec)
    for group in [*spec["workerGroupSpecs"], spec["headGroupSpec"]]:
        for name in COUNTS:
            group.pop(name, None)
        annotations = group["template"]["metadata"]["annotations"]
        annotations.pop("slicewise.io/template-hash", None)
    return spec


def test_cluster_then_has_all_of_its_rayservice_but_the_counts(running: Applied, api: Api) -> None:
    carry = carry_over(running.service, running.cluster, running.pods)
    changed = api.patch(running.cluster, list(carry.patch))
    assert without_counts(changed["spec"]) == without_counts(running.wanted)
    counts = {
        group["groupName"]: group["replicas"] for group in changed["spec"]["workerGroupSpecs"]
    }
    assert (counts["v6e-2x2-spot"], counts["v6e-2x2-reserved"]) == (3, 1)
    again = carry_over(running.service, changed, running.pods)
    assert (again.changes, again.hindrances, again.patch) == ((), (), ())


def test_patch_is_refused_where_somebody_else_was_faster(running: Applied, api: Api) -> None:
    carry = carry_over(running.service, running.cluster, running.pods)
    count = {"op": "replace", "path": "/spec/workerGroupSpecs/3/replicas", "value": 2}
    api.patch(running.cluster, [count])
    with pytest.raises(RefusedByServerError):
        api.patch(running.cluster, list(carry.patch))
