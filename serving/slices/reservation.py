"""Holds whole slices in one placement group: each bundle is pinned to its host by name and node id.

Several slices stand in one group as well, one after the other: Ray grants all of it or nothing
(`docs/adr/0013`). Owns the making of the group. The group is detached: it outlives the process that
reserved it, with the engine on it, until it is removed (`ownership.group`). Does not own the choice
of the slices (`inventory`, `allocator`) nor what runs on them.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup

from serving.domain.inventory import (
    NODE_ID_LABEL,
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    WORKER_ID_LABEL,
    ObservedHost,
    Slice,
)
from serving.domain.topology import SliceShape
from serving.ownership.group import GROUP_PREFIX, remove_group

logger = logging.getLogger(__name__)

# Measured 0.2 to 1.4 s with Ray 2.60. Whoever has to wait longer has lost a race for the slice, or
# one of its hosts has just gone.
READY_TIMEOUT_S = 6.0
_POLL_S = 0.05


class ReservationError(RuntimeError):
    """The reservation failed in part, so nothing is held. Ask for other slices."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The held slices, all of one kind. Give them back with `release`."""

    slices: tuple[Slice, ...]
    placement_group: PlacementGroup  # the bundles are the hosts, slice after slice

    @property
    def name(self) -> str:
        """The slices' names, for a reader."""
        return names_of(self.slices)

    @property
    def group_id(self) -> str:
        """Ray's id of the group, in hexadecimal."""
        return str(self.placement_group.id.hex())

    def on_host(self, worker_id: int, part: int = 0) -> PlacementGroupSchedulingStrategy:
        """Returns the scheduling strategy for an actor on that host of slice `part`."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.placement_group,
            placement_group_bundle_index=part * len(self.slices[0].hosts) + worker_id,
            # Actors of actors in here must ask for their place by name, as these do.
            placement_group_capture_child_tasks=False,
        )

    async def release(self) -> None:
        """Gives the slices back and ends what runs in them. Idempotent.

        It returns when Ray's head has removed the group, however long there is no head.
        """
        await asyncio.to_thread(remove_group, self.group_id)
        for each in self.slices:
            logger.info("slice_released slice=%s", each.name)


def names_of(slices: Sequence[Slice]) -> str:
    """Returns the names of slices that belong together, such as `a and b`."""
    return " and ".join(each.name for each in slices)


def bundle_selectors(slices: Sequence[Slice]) -> list[dict[str, str]]:
    """Returns one label selector per bundle: the hosts of the first slice, then of the next.

    The node id tells a lost host from one that returns under its name. Without it Ray would quietly
    complete the group with the new one.
    """
    return [_selector(host) for whole in slices for host in whole.hosts]


async def reserve(
    slices: Sequence[Slice],
    shape: SliceShape,
    cpus_per_host: float,
    *,
    timeout_s: float = READY_TIMEOUT_S,
) -> Reservation:
    """Reserves every host of all `slices`, or nothing.

    A cancelled call gives back what it has.

    Raises:
        ReservationError: not all of it could be had within `timeout_s`, or Ray has no head.
    """
    task = asyncio.create_task(asyncio.to_thread(_create, slices, shape, cpus_per_host))
    try:
        # Shielded: a group whose creation was cut off could not be removed.
        group = await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_shut_down_unwanted)
        raise
    except GetTimeoutError as error:
        # Measured with Ray 2.60: what it has not made by then it does not make later.
        raise ReservationError("Ray has no head that could reserve a slice") from error
    reservation = Reservation(tuple(slices), group.placement_group)
    try:
        async with asyncio.timeout(timeout_s):
            node_ids = await _node_ids(reservation.placement_group)
    except TimeoutError as error:
        await reservation.release()
        message = f"slice {reservation.name} was not to be had within {timeout_s:g} s"
        raise ReservationError(message) from error
    except BaseException:
        with contextlib.suppress(Exception):
            await asyncio.shield(reservation.release())
        raise
    wanted = [host.node_id for whole in slices for host in whole.hosts]
    if node_ids != wanted:
        await reservation.release()
        raise ReservationError(f"slice {reservation.name} stands on {node_ids}, not on {wanted}")
    for whole in slices:
        logger.info("slice_reserved slice=%s hosts=%d", whole.name, len(whole.hosts))
    return reservation


def _create(
    slices: Sequence[Slice], shape: SliceShape, cpus_per_host: float
) -> SlicePlacementGroup:
    # With a slice name in every selector Ray makes no head reservation, which would ignore them.
    return SlicePlacementGroup(
        topology=shape.topology,
        accelerator_version=shape.ray_accelerator_type.removeprefix("TPU-").lower(),
        strategy="STRICT_SPREAD",
        chips_per_vm=shape.chips_per_host,
        resources_per_bundle={"CPU": cpus_per_host} if cpus_per_host else None,
        num_slices=len(slices),
        bundle_label_selector=bundle_selectors(slices),
        lifetime="detached",
        name=f"{GROUP_PREFIX}{names_of(slices)}:{uuid.uuid4().hex[:8]}",
    )


def _shut_down_unwanted(creation: "asyncio.Task[SlicePlacementGroup]") -> None:
    if not creation.cancelled() and creation.exception() is None:
        group_id = creation.result().placement_group.id.hex()
        asyncio.get_running_loop().run_in_executor(None, remove_group, group_id)


async def _node_ids(group: PlacementGroup) -> list[str]:
    """Returns the node of each bundle, once the group stands."""
    while True:
        table: dict[str, Any] = await asyncio.to_thread(placement_group_table, group)
        if table["state"] == "CREATED":
            nodes: dict[int, str] = table["bundles_to_node_id"]
            return [nodes[index] for index in sorted(nodes)]
        if table["state"] == "REMOVED":
            raise ReservationError("the placement group was removed")
        await asyncio.sleep(_POLL_S)


def _selector(host: ObservedHost) -> dict[str, str]:
    labels = {NODE_ID_LABEL: host.node_id}
    for name in (SLICE_NAME_LABEL, WORKER_ID_LABEL, POD_TYPE_LABEL):
        if name in host.labels:
            labels[name] = host.labels[name]
    return labels
