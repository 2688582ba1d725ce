"""Slices of one host whose names a webhook gives again, as an old one does: real raylets.

The provisioner and replicas as in `test_slices_by_name`; only what hosts are told differs. What
`make test` has of it, without raylets, is in `test_thirty_losses`.
"""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
import ray
from control_plane.server import ControlPlane

from autoscaling.provisioning.raycluster import REPLICA_INDEX_LABEL
from serving.domain.inventory import SLICE_NAME_LABEL
from serving.domain.topology import slice_shape

from .cluster import EmulatedCluster
from .objects import raycluster, rayservice, worker_group
from .replicas import Replica, replicas, until
from .test_slices_by_name import DEATH_S, holds, provisioning
from .webhook_server import Webhook

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

logger = logging.getLogger(__name__)

SHAPE = slice_shape("v6e", "2x2")
SPOT = "v6e-2x2-spot"


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane, webhook: Webhook) -> Iterator[EmulatedCluster]:
    made = raycluster(
        worker_group(SPOT, SHAPE, "spot", max_replicas=4, has_host_index=False),
        idle_timeout_s=5,
        is_of_service=True,
    )
    with EmulatedCluster(control_plane, made, {SPOT: 1.0}, service=rayservice(made)) as running:
        yield running


def names_in_ray() -> list[str]:
    """The slice names that living hosts have."""
    return [
        node["Labels"][SLICE_NAME_LABEL]
        for node in ray.nodes()
        if node["Alive"] and SLICE_NAME_LABEL in node["Labels"]
    ]


def index_of(cluster: EmulatedCluster, replica: Replica) -> str:
    """KubeRay's index of the slice that a replica has."""
    (host,) = replica.record.hosts
    (pod,) = [pod for pod in cluster.pods(SPOT) if pod["status"].get("podIP") == host.address]
    return str(pod["metadata"]["labels"][REPLICA_INDEX_LABEL])


async def test_replicas_keep_and_regain_slices_whose_names_are_given_again(
    cluster: EmulatedCluster,
) -> None:
    async with replicas("spot", SHAPE) as fleet, provisioning(cluster, fleet.records):
        everyone = [fleet.start() for _ in range(3)]
        up_s = await until(holds(*everyone), "three slices are held")
        holder = next(each for each in everyone if index_of(cluster, each) == "0")
        others = {each: each.node_ids for each in everyone if each is not holder}

        cluster.lose(f"{SPOT}-0")
        await until(lambda: len(holder.lost) == 1, "the loss is noticed", DEATH_S)
        back_s = await until(holds(*everyone), "the replacement is held")
        # The webhook has given it the name of a living one, and neither is mistaken for the other.
        assert sorted(Counter(names_in_ray()).values()) == [1, 2]
        assert {each: each.node_ids for each in others} == others
        assert len(frozenset[str]().union(*(each.node_ids for each in everyone))) == 3
        assert len({each.slice_name for each in everyone}) == 3

        index = index_of(cluster, holder)
        staying = {index_of(cluster, each) for each in others}
        await holder.leave()

        def is_dropped() -> bool:
            left = {pod["metadata"]["labels"][REPLICA_INDEX_LABEL] for pod in cluster.pods(SPOT)}
            return left == staying and cluster.group(SPOT)["replicas"] == 2

        down_s = await until(is_dropped, "the slice that was left is gone, its namesake is not")
        assert index not in staying
        assert {each: each.node_ids for each in others} == others
        logger.info("single_hosts up_s=%.1f back_s=%.1f down_s=%.1f", up_s, back_s, down_s)
