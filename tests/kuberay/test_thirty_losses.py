"""Ten slices of one host and three of two, thirty of which are lost: each is replaced, once.

Control plane and watch are real, operator and webhook emulated, directory and provisioner the
product's; raylets and engines are stood in for (`ray_by_hand`, `fleet_by_hand`).

Two mends are taken out again, because the recorded operator and webhook undo a fleet without them:

- Hosts of single-host slices have an index, or the webhook gives names of living slices again.
- More slices than are asked for are dropped by name, or one that was named too late stays.
"""

import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from control_plane.server import ControlPlane

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.plan import ProvisioningPlan
from autoscaling.provisioning.protocol import ClusterObservation, Provisioner
from serving.directory import supply_book
from serving.domain.inventory import ObservedHost
from serving.domain.supply.found import FoundSlice
from serving.domain.supply.pods import GroupPods

from .cloud import Loss
from .losses import DOUBLE, KINDS, SINGLE, Kind, LosingFleet, losing_fleet
from .webhook_server import Webhook

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

logger = logging.getLogger(__name__)

_SEED = 30


def thirty_losses(dice: random.Random) -> Iterator[list[Loss]]:
    """Thirty losses in random order: one, two or three at once."""
    left = [Loss.GONE, Loss.FAILED] * 12 + [Loss.VANISHED] * 6
    dice.shuffle(left)
    while left:
        count = dice.choice((1, 1, 2, 3))
        yield left[:count]
        left = left[count:]


def log_figures(losing: LosingFleet) -> None:
    """What was lost and made, and how long replicas were without a slice."""
    made = {kind.group: len(losing.ever.incarnations(kind.group)) for kind in KINDS}
    logger.info("measured losses=%d slices_made=%s", len(losing.taken), made)
    for how in Loss:
        took_s = sorted(each.took_s for each in losing.taken if each.how is how)
        logger.info(
            "measured how=%s losses=%d median_s=%.1f max_s=%.1f",
            how, len(took_s), median(took_s), took_s[-1],
        )  # fmt: skip


@pytest.mark.parametrize(
    "collected_after_s",
    [
        pytest.param(4.0, id="collected at once"),
        # After 40 to 80 s.
        pytest.param(None, id="collected by Kubernetes"),
    ],
)
async def test_thirty_losses_leave_everybody_a_slice_and_nothing_else(
    control_plane: ControlPlane,
    webhook: Webhook,
    tmp_path: Path,
    collected_after_s: float | None,
) -> None:
    async with losing_fleet(control_plane, tmp_path, _SEED) as losing:
        losing.cluster.cloud.collected_after_s = collected_after_s
        for burst in thirty_losses(losing.dice):
            await losing.lose(*burst)
            await losing.recover()
            assert await losing.wrong_now() == []
        assert len(losing.taken) == 30
        await losing.leave_while_it_is_replaced(DOUBLE)
        await losing.end()
        assert await losing.left_over() == []
        log_figures(losing)


SIX_LOSSES = ([Loss.GONE], [Loss.FAILED, Loss.GONE], [Loss.FAILED, Loss.GONE, Loss.FAILED])


async def test_without_a_host_index_names_of_living_slices_are_given_again(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path
) -> None:
    """The product does not go by those names any more: this costs nobody a slice. See below."""
    async with losing_fleet(control_plane, tmp_path, _SEED, has_host_index=False) as losing:
        for burst in SIX_LOSSES:
            await losing.lose(*burst, kinds=(SINGLE,))
            await losing.recover()
        assert losing.waiting() == []
        wrong = await losing.wrong_now()
        assert wrong
        assert all(each.startswith(f"{SINGLE.group}-") for each in wrong), wrong
        assert all(" is the name of " in each for each in wrong), wrong


def slices_as_told(
    hosts: Iterable[ObservedHost], groups: Iterable[GroupPods] = ()
) -> list[FoundSlice]:
    """The slices by the names that hosts were told, as if a name were an identity."""
    by_name: dict[str, list[ObservedHost]] = {}
    for host in hosts:
        by_name.setdefault(host.slice_name, []).append(host)
    found = []
    for name, members in sorted(by_name.items()):
        ordered = tuple(sorted(members, key=lambda host: host.worker_id))
        shape = ordered[0].shape
        assert shape is not None
        found.append(FoundSlice(ordered[0].instance_id, name, shape, ordered))
    return found


async def test_without_a_host_index_and_by_name_alone_replicas_wait_for_good(
    control_plane: ControlPlane,
    webhook: Webhook,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three layers keep it from that, and all are out here: the index, the identity of a slice by
    its pods, and, where no pods are known, that each single host is a slice whatever its name.
    """
    monkeypatch.setattr(supply_book, "find_slices", slices_as_told)
    async with losing_fleet(control_plane, tmp_path, _SEED, has_host_index=False) as losing:
        await losing.lose(Loss.GONE, Loss.GONE, Loss.GONE, kinds=(SINGLE,))
        # Several times as long as a replica waits otherwise.
        await losing.rounds(8)
        waiting, wrong = losing.waiting(), await losing.wrong_now()
        assert waiting
        # What nobody may take is bought again and again, up to the bound.
        assert any(f"slices of {SINGLE.group} were bought" in each for each in wrong), wrong
        logger.info("measured waiting=%s wrong=%s", waiting, wrong)


class ByCountAlone:
    """A provisioner that shows of each group no more slices than are asked for, the oldest."""

    def __init__(self, provisioner: Provisioner) -> None:
        self._provisioner = provisioner
        self._seen: dict[str, int] = {}

    async def observe(self) -> ClusterObservation:
        found = await self._provisioner.observe()
        return replace(found, groups=tuple(map(self._oldest, found.groups)))

    async def catch_up(self) -> None:
        await self._provisioner.catch_up()

    async def apply(self, plan: ProvisioningPlan) -> None:
        await self._provisioner.apply(plan)

    def _oldest(self, group: WorkerGroup) -> WorkerGroup:
        for each in group.slices:
            self._seen.setdefault(each.incarnation, len(self._seen))
        in_order = sorted(group.slices, key=lambda each: self._seen[each.incarnation])
        return replace(group, slices=tuple(in_order[: group.asked_for]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.group)
async def test_by_the_count_alone_a_slice_that_was_named_too_late_stays_for_good(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path, kind: Kind
) -> None:
    """The plan alone keeps it from that: it counts the slices that there are (`_plan_group`).

    KubeRay deletes nothing for a count that falls, and Ray's autoscaler has no say here.
    """
    async with losing_fleet(control_plane, tmp_path, _SEED, around=ByCountAlone) as losing:
        for burst in SIX_LOSSES:
            await losing.lose(*burst)
            await losing.recover()
        await losing.leave_while_it_is_replaced(kind)
        # More than twice as long as a slice may be idle.
        await losing.rounds(6)
        assert losing.cluster.group(kind.group)["replicas"] == kind.num_replicas
        num_pods = len(losing.cluster.pods(kind.group))
        assert num_pods == (kind.num_replicas + 1) * kind.shape.num_hosts
