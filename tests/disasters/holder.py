"""A program that holds slices by the product's own code while its cluster's head is away.

Run as a process of its own in the cluster's environment: `python -m tests.disasters.holder ADDRESS
FOLDER`. What it does is done in an actor on a worker host, which the driver and the head do not
take along. It writes a line to `FOLDER/said` for each thing that has come about, and waits for
`FOLDER/leave` before it gives its first slice back.
"""

import asyncio
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group_table

from serving.directory.ray_hosts import observe_cluster
from serving.domain.inventory import Slice, SliceRequest
from serving.domain.supply.found import find_slices, match_slices
from serving.domain.topology import slice_shape
from serving.slices.reservation import ReservationError, reserve

SHAPE = slice_shape("v6e", "1x1", None)
WANT = SliceRequest(
    "spot", SHAPE.ray_pod_type, SHAPE.topology, 1, 1, {"ray.io/market-type": "spot"}
)
_POLL_S = 0.1


class Holder:
    """An async actor."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def _say(self, what: str) -> None:
        with (self._folder / "said").open("a") as said:
            said.write(f"{what}\n")

    async def run(self) -> None:
        """Holds one slice, gives it back without a head, and fails to get another one."""
        first, second = await self._two_slices()
        held = await reserve([first], SHAPE, 0.01)
        self._say("held")
        # The order comes from another process.
        while not (self._folder / "leave").exists():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        leaving = asyncio.create_task(held.release())
        try:
            await reserve([second], SHAPE, 0.01)
        except ReservationError as error:
            self._say(f"refused: {error}")
        await leaving
        self._say("released")
        table = await asyncio.to_thread(placement_group_table)
        self._say(f"groups: {sorted(each['state'] for each in table.values())}")

    async def _two_slices(self) -> tuple[Slice, Slice]:
        while len(free := match_slices(find_slices(await observe_cluster()), WANT).free) < 2:  # noqa: ASYNC110 - Ray has no event
            await asyncio.sleep(_POLL_S)
        return free[0], free[1]


def main(address: str, folder: str) -> None:
    """Leaves the actor behind and waits for nothing."""
    ray.init(address=address, namespace="holder", log_to_driver=False, logging_level="ERROR")
    actor = ray.remote(Holder).options(lifetime="detached", name="holder", num_cpus=0.01)
    holder = actor.remote(folder)
    ray.get(holder.__ray_ready__.remote())
    holder.run.remote()


if __name__ == "__main__":
    main(*sys.argv[1:])
