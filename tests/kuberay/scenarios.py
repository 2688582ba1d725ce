"""What was done in each recorded scenario (`tests/data/kuberay/README.md`), one function each."""

from collections.abc import Callable, Iterator

from .cloud import Loss
from .play import Play

Scenario = Callable[[Play], Iterator[None]]

SPOT = "v6e-2x2-spot"
PAIRS, HOSTS = "tpu7x-2x2x2-spot", "tpu7x-2x2x1-spot"
CHIPS, QUOTA = "llm-chips", 28


def as_rendered(play: Play) -> Iterator[None]:
    """Installed while the reserved class is out of stock, which it is no more later."""
    play.hand.cloud.delays_s["v6e-2x2-reserved"] = None
    play.applications("DEPLOYING")
    play.install()
    play.settle()
    yield
    play.hand.cloud.delays_s["v6e-2x2-reserved"] = 0.0
    play.settle()
    play.applications("RUNNING")
    play.settle()
    yield


def installed(play: Play, *, as_cluster: bool = False, **counts: int) -> None:
    """Installed, with applications that run after a while."""
    play.applications("DEPLOYING")
    play.install(as_cluster=as_cluster, **counts)
    play.settle()
    play.applications("RUNNING")
    play.settle()


def two_hosts_as_rendered(play: Play) -> Iterator[None]:
    installed(play, **{PAIRS: 0})
    play.scale(PAIRS, 2, names=True, mirrored=True)
    play.settle()
    yield


def one_cluster_for_long(play: Play) -> Iterator[None]:
    """01 to 06 were done to one cluster, one after the other."""
    installed(play)
    yield
    play.scale(SPOT, 3)
    play.settle()
    yield
    yield from _single_hosts_lost(play)
    yield from _scaled_by_name(play)
    play.hand.start_operator()
    play.settle()
    yield
    play.lose_head()
    yield
    play.change_service(12)
    play.settle()
    yield
    play.limit_chips(CHIPS, QUOTA)
    play.applications("DEPLOYING")
    play.change_service(13)
    play.settle()
    yield
    play.applications("RUNNING")
    play.settle()
    yield


def _single_hosts_lost(play: Play) -> Iterator[None]:
    for index in range(3):
        play.lose(f"{SPOT}-{index}")
        yield
    leaving = play.pod(f"{SPOT}-1")
    play.delete_held(leaving)
    yield
    play.let_go(leaving)
    yield


def _scaled_by_name(play: Play) -> Iterator[None]:
    named = play.pod(f"{SPOT}-1")["metadata"]["name"]
    play.scale(SPOT, 2, named, mirrored=True)
    play.settle()
    yield
    play.scale(SPOT, 4, names=True, mirrored=True)
    play.settle()
    yield
    play.scale(SPOT, 3, named, mirrored=True)
    play.settle()
    yield


def slices_of_two_hosts(play: Play) -> Iterator[None]:
    """Three slices are asked for where two are allowed."""
    installed(play)
    play.scale(PAIRS, 3)
    play.settle()
    yield
    play.lose(f"{PAIRS}-0", host=1)
    yield
    play.scale(PAIRS, 2, play.pod(f"{PAIRS}-1")["metadata"]["name"])
    play.settle()
    yield
    play.scale(PAIRS, 3, names=True)
    play.settle()
    yield


def every_shape(play: Play) -> Iterator[None]:
    """One slice of every group, while the applications are deploying."""
    play.applications("DEPLOYING")
    play.install()
    play.settle()
    (cluster,) = play.clusters()
    groups = cluster["spec"]["workerGroupSpecs"]
    play.scale_all({each["groupName"]: 1 for each in groups if each["groupName"] != "gateway"})
    play.settle()
    yield


def names_after_losses(play: Play) -> Iterator[None]:
    """Six hosts of ten are lost, one after the other, and one more once the webhook is away."""
    installed(play)
    play.scale(SPOT, 10, maximum=12)
    play.settle()
    for index in (0, 4, 7, 2):
        play.lose(f"{SPOT}-{index}")
    yield
    for index in (1, 5):
        play.lose(f"{SPOT}-{index}")
    play.webhook.stop()
    try:
        play.lose(f"{SPOT}-3")
        yield
    finally:
        play.webhook.start()


def single_hosts_with_an_index(play: Play) -> Iterator[None]:
    installed(play, **{SPOT: 0})
    play.scale(SPOT, 3, names=True, mirrored=True)
    play.settle()
    for index in (1, 0, 2, 1, 2, 0):
        play.lose(f"{SPOT}-{index}")
    yield


def nodes_shut_down(play: Play) -> Iterator[None]:
    """One host of two is Failed, then a single one, then a node is gone without a word."""
    installed(play)
    for group in (PAIRS, HOSTS):
        play.scale(group, 2)
        play.settle()
    play.lose(f"{PAIRS}-0", how=Loss.FAILED)
    yield
    play.lose(f"{HOSTS}-0", how=Loss.FAILED)
    yield
    before = {pod["metadata"]["uid"] for pod in play.hand.pods(PAIRS)}
    # Kubernetes takes a minute for it, which changes nothing (the long tests wait for it).
    play.hand.cloud.collected_after_s = 0.0
    play.hand.lose(f"{PAIRS}-1", how=Loss.VANISHED)

    def is_replaced() -> bool:
        now = {pod["metadata"]["uid"] for pod in play.hand.pods(PAIRS)}
        return len(now & before) == 2 and len(now) == 4

    play.settle(is_replaced)
    yield


def raycluster_flavour(play: Play) -> Iterator[None]:
    play.install()
    play.settle()
    yield


def manifests_applied_again(play: Play) -> Iterator[None]:
    """A bound, an image, a group: each applied to the RayService after the one before."""
    installed(play, as_cluster=True, **{SPOT: 0})
    play.scale(SPOT, 3)
    play.settle()
    for moment in range(3):
        play.change_service(moment)
        play.settle()
        yield


def group_appended(play: Play) -> Iterator[None]:
    play.applications("RUNNING")
    play.install(num_groups=-1)
    play.settle()
    play.scale(SPOT, 3)
    play.settle()
    play.change_service(0)
    play.settle()
    yield


SCENARIOS: dict[str, Scenario] = {
    "00-as-rendered": as_rendered,
    "00-two-hosts": two_hosts_as_rendered,
    "01-to-06": one_cluster_for_long,
    "07-multi-host-slices": slices_of_two_hosts,
    "08-every-shape-tpu7x": every_shape,
    "08-every-shape-v5e": every_shape,
    "08-every-shape-v5p": every_shape,
    "08-every-shape-v6e": every_shape,
    "09-names-after-losses": names_after_losses,
    "10-single-host-with-host-index": single_hosts_with_an_index,
    "11-node-shutdown": nodes_shut_down,
    "12-raycluster-flavour": raycluster_flavour,
    "13-manifests-applied-again": manifests_applied_again,
    "13-only-a-group-appended": group_appended,
}
