"""A fleet that loses slices: what takes them, until when it waits, and what is wrong afterwards.

Whoever has not noticed a loss holds a slice that is not there. So each loss is waited for twice:
until its replica has begun another life, and until as many slices are held as there can be.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from control_plane.api import wait
from control_plane.server import ControlPlane

from autoscaling.provisioning.protocol import Provisioner
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.records import SupplyState
from serving.domain.topology import SliceShape, slice_shape
from tests.deployments.manifests.examples import shipped_folder

from .by_hand import ClusterByHand
from .cloud import Cloud, Loss
from .fleet_by_hand import APPLICATION, COMPUTE_CLASS, FleetByHand, ReplicaByHand, fleet_on
from .objects import raycluster, rayservice, replica_of, worker_group
from .pods_ever import PodsEver
from .ray_by_hand import RayByHand
from .replicas import until
from .webhook import NAME, told_to

logger = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A worker group, and how many replicas want a slice of it."""

    group: str
    shape: SliceShape
    num_replicas: int


SINGLE = Kind("v6e-2x2-spot", slice_shape("v6e", "2x2", 4), 10)
DOUBLE = Kind("v6e-2x4-spot", slice_shape("v6e", "2x4", 4), 3)
KINDS = (SINGLE, DOUBLE)
# Room for what nobody wants: were something bought twice, it would come.
_TO_SPARE = 4
_DELIVERY_S = 0.3


@dataclass(frozen=True, slots=True)
class TakenSlice:
    """A slice that was taken from a replica in its life number `life`."""

    victim: ReplicaByHand
    life: int
    how: Loss
    at_s: float

    @property
    def is_noticed(self) -> bool:
        """Whether its replica has begun another life."""
        return self.victim.lives > self.life

    @property
    def took_s(self) -> float:
        """How long until the same replica had a slice again."""
        return self.victim.had_at_s[self.life] - self.at_s


@dataclass
class LosingFleet:
    """Everybody in it has a slice once it has begun. `taken` are those that were lost since."""

    cluster: ClusterByHand
    fleet: FleetByHand
    ever: PodsEver
    dice: random.Random
    taken: list[TakenSlice] = field(default_factory=list)
    # Replicas that came and left, by group.
    _num_guests: Counter[str] = field(default_factory=Counter)
    # Pods whose node went without a word, and their groups, until they are collected.
    _vanished: dict[str, str] = field(default_factory=dict)

    async def begin(self) -> None:
        """Everybody gets a slice."""
        for kind in KINDS:
            self.fleet.start(kind.shape, kind.num_replicas)
        await self.recover()

    async def lose(self, *hows: Loss, kinds: Sequence[Kind] = KINDS) -> None:
        """Takes a slice from as many replicas at once; returns once they have noticed."""
        holding = [each for each in self.fleet.holding() if _kind_of(each) in kinds]
        for victim, how in zip(self.dice.sample(holding, len(hows)), hows, strict=True):
            self.taken.append(TakenSlice(victim, victim.lives, how, time.monotonic()))
            await asyncio.to_thread(self._take_host, victim, how)
        await until(
            lambda: all(each.is_noticed for each in self.taken),
            "every loss is noticed by its replica",
        )

    async def recover(self) -> None:
        """Waits until everybody has a slice for whom there can be one."""

        async def is_recovered() -> bool:
            away = Counter(await asyncio.to_thread(self._uncollected))
            return all(
                len(self.fleet.holding(kind.shape)) >= kind.num_replicas - away[kind.group]
                for kind in KINDS
            )

        try:
            await until(is_recovered, "everybody has a slice again")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.waiting()}") from None

    async def end(self) -> None:
        """Waits until whatever is on its way has come or gone."""

        async def has_ended() -> bool:
            return not await asyncio.to_thread(self._uncollected) and not await self.left_over()

        # What is left over then is for the caller to say.
        with contextlib.suppress(AssertionError):
            await until(has_ended, "nothing is on its way")

    def waiting(self) -> list[str]:
        """Who has no slice, and why."""
        return [
            f"{each.replica_id} waits: {each.reason}"
            for each in self.fleet.replicas
            if each.whole is None
        ]

    async def wrong_now(self) -> list[str]:
        """What is wrong, whatever is on its way."""
        nodes = Counter(
            node_id
            for each in self.fleet.holding()
            if each.whole is not None
            for node_id in each.whole.node_ids
        )
        wrong = [
            f"{node_id} is held {count} times" for node_id, count in nodes.items() if count > 1
        ]
        told = await asyncio.to_thread(self.names_told)
        wrong += [f"{name} is the name of {of}" for name, of in told.items() if len(of) > 1]
        for kind in KINDS:
            made, expected = len(self.ever.incarnations(kind.group)), self.num_bought(kind)
            if made > expected + self._num_guests[kind.group]:
                wrong.append(f"{made} slices of {kind.group} were bought, not {expected}")
            asked, most = (
                self._most_asked_for(kind),
                kind.num_replicas + self._num_guests[kind.group],
            )
            if asked > most:
                wrong.append(f"{asked} slices of {kind.group} were asked for at once, not {most}")
        return wrong

    async def left_over(self) -> list[str]:
        """What is not as it has to be once nothing is on its way; empty: all is well."""
        found = self.waiting() + await self.wrong_now()
        for kind in KINDS:
            found += await asyncio.to_thread(self._left_over_of, kind)
        supply = await self.fleet.supply()
        names = Counter(record.name for record in supply)
        found += [f"{count} records are named {name}" for name, count in names.items() if count > 1]
        return found + [
            f"{record.incarnation} is {record.state}: {record.reason}"
            for record in supply
            if record.state != SupplyState.HELD
        ]

    def _left_over_of(self, kind: Kind) -> list[str]:
        stored, pods = self.cluster.group(kind.group), self.cluster.pods(kind.group)
        found = []
        if stored["replicas"] != kind.num_replicas:
            found.append(f"{kind.group} asks for {stored['replicas']}, not {kind.num_replicas}")
        if len(pods) != (expected := kind.num_replicas * kind.shape.num_hosts):
            found.append(f"{kind.group} has {len(pods)} pods, not {expected}")
        named = set(stored.get("scaleStrategy", {}).get("workersToDelete") or ())
        for pod in pods:
            name, phase = pod["metadata"]["name"], pod["status"]["phase"]
            if phase != "Running" or "deletionTimestamp" in pod["metadata"] or name in named:
                found.append(f"{name} is {phase}, and goes or is to go")
        if (made := len(self.ever.incarnations(kind.group))) != self.num_bought(kind):
            found.append(f"{made} slices of {kind.group} were bought, not {self.num_bought(kind)}")
        return found

    def _most_asked_for(self, kind: Kind) -> int:
        """The highest count that the provisioner ever gave a group."""
        return max((now for _, now in self._counts(kind)), default=0)

    def _num_lowered(self, kind: Kind) -> int:
        """How often the provisioner gave a group a lower count than it had."""
        return sum(now < before for before, now in self._counts(kind))

    def _counts(self, kind: Kind) -> list[tuple[int, int]]:
        """The count of a group before and after each change of the provisioner."""
        found = []
        for request in self.cluster.proxy.requests(verb="patch"):
            values = {
                (each["op"], each["path"].split("/")[-1]): each["value"] for each in request.body
            }
            is_of_group = values.get(("test", "groupName")) == kind.group
            if is_of_group and request.status == httpx.codes.OK:
                found.append((values["test", "replicas"], values["replace", "replicas"]))
        return found

    def num_bought(self, kind: Kind) -> int:
        """How many slices of a group there have to have been: one each, and one for each lost."""
        lost = sum(_kind_of(each.victim) == kind for each in self.taken)
        # A guest's own, and one for each time that it was named too late; the last time it was not.
        of_guests = self._num_lowered(kind) if self._num_guests[kind.group] else 0
        return kind.num_replicas + lost + of_guests

    def names_told(self) -> dict[str, set[str]]:
        """The living slices by the name that their hosts were told."""
        found: dict[str, set[str]] = {}
        for kind in KINDS:
            for pod in self.cluster.pods(kind.group):
                if "deletionTimestamp" not in pod["metadata"]:
                    found.setdefault(told_to(pod)[NAME], set()).add(replica_of(pod))
        return found

    async def leave_while_it_is_replaced(self, kind: Kind) -> None:
        """A guest, one replica more, comes and leaves; its slice is replaced before it is named.

        The fence ends the Ray nodes of a slice right before it is dropped, and KubeRay replaces
        pods that have ended. It may do so before it is told which slice goes: the name is nobody's
        then, and the replacement one too many.
        """
        self._num_guests[kind.group] += 1
        (guest,) = self.fleet.start(kind.shape, 1)
        num_slices = kind.num_replicas + 1
        await until(lambda: len(self.fleet.holding(kind.shape)) == num_slices, "it has a slice too")
        assert guest.whole is not None
        hosts = {host.instance_id for host in guest.whole.hosts}
        is_named = threading.Event()

        def is_replaced() -> bool:
            there = self._pods_of(kind)
            return not there & hosts and len(there) == num_slices * kind.shape.num_hosts

        def hold_up(patch: list[Json]) -> bool:
            if hosts.isdisjoint(_names_in(patch)):
                return False
            wait(is_replaced, f"{hosts} are replaced")
            is_named.set()
            return True

        self.cluster.proxy.interpose("patch", hold_up)
        await self.fleet.leave(guest)
        await until(is_named.is_set, "its slice is named")

    async def rounds(self, count: int) -> None:
        """Waits until the provisioner has said so many times more, seconds apart, that it lives."""
        beats = set()

        def has_beaten() -> bool:
            beats.add(self.fleet.tools.ray.internal_kv_get(SupplyKeys(APPLICATION).pods_beat))
            return len(beats) > count

        await until(has_beaten, f"{count} beats")

    def _pods_of(self, kind: Kind) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.cluster.pods(kind.group)}

    def _take_host(self, victim: ReplicaByHand, how: Loss) -> None:
        assert victim.whole is not None
        name = self.dice.choice(victim.whole.hosts).instance_id
        pod = self.cluster.api.get("Pod", self.cluster.namespace, name)
        if how is Loss.VANISHED:
            self._vanished[name] = _kind_of(victim).group
        self.cluster.cloud.lose_pod(pod, how)

    def _uncollected(self) -> list[str]:
        """The groups of pods whose node is gone and who are still there."""
        if self._vanished:
            there = {pod["metadata"]["name"] for pod in self.cluster.pods()}
            self._vanished = {name: of for name, of in self._vanished.items() if name in there}
        return list(self._vanished.values())


def _kind_of(replica: ReplicaByHand) -> Kind:
    return next(kind for kind in KINDS if kind.shape == replica.shape)


def _names_in(patch: list[Json]) -> list[str]:
    """The pods that a change of ours names."""
    strategies = [each["value"] for each in patch if each["path"].endswith("/scaleStrategy")]
    return [name for each in strategies for name in each["workersToDelete"]]


@contextlib.asynccontextmanager
async def losing_fleet(
    plane: ControlPlane,
    folder: Path,
    seed: int,
    *,
    has_host_index: bool = True,
    around: Callable[[Provisioner], Provisioner] = lambda provisioner: provisioner,
) -> AsyncIterator[LosingFleet]:
    """A fleet in which everybody has a slice. Operator and cloud move by themselves.

    `has_host_index` and `around` take mends out: see `worker_group` and `fleet_on`.
    """
    dice = random.Random(seed)
    groups = (
        worker_group(
            kind.group,
            kind.shape,
            COMPUTE_CLASS,
            max_replicas=kind.num_replicas + _TO_SPARE,
            has_host_index=has_host_index,
        )
        for kind in KINDS
    )
    made = raycluster(*groups, is_of_service=True)
    service = rayservice(made)
    (rendered,) = shipped_folder("example.yaml").of_kind("RayService")
    service["spec"]["upgradeStrategy"] = rendered.body["spec"]["upgradeStrategy"]
    with ClusterByHand(plane, made, folder, service=service) as cluster:
        ray = RayByHand(random.Random(dice.random()))
        delays: dict[str, float | None] = {kind.group: _DELIVERY_S for kind in KINDS}
        cluster.cloud = Cloud(cluster.api, cluster.namespace, delays, ray)
        async with PodsEver(plane, cluster.namespace) as ever:
            with cluster.running():
                async with fleet_on(
                    cluster.access, ray, random.Random(dice.random()), around
                ) as fleet:
                    found = LosingFleet(cluster, fleet, ever, dice)
                    await found.begin()
                    yield found
