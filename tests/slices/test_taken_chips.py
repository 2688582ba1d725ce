"""Chips that another process keeps: waited for up to a bound, and then the slice is given up."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup

from serving.config.slice_spec import SliceSpec, Work
from serving.domain.inventory import ObservedHost, Slice
from serving.domain.slice_lifecycle import EndCause
from serving.domain.supply.faults import FaultCause
from serving.domain.topology import slice_shape
from serving.slices.held import HeldSlices, ProbeFailedError
from serving.slices.reservation import Reservation
from serving.tpu.host.chip_use import wait_chips_free
from tests.slices.watched_host import SECRET

BOUND_S = 0.3
TAKEN = "/dev/vfio/1 is open in a process that has not let go of it"


@dataclass(frozen=True)
class Remote:
    """A method as a Ray handle has it."""

    method: Callable[..., Awaitable[Any]]

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self.method(*arguments)


@dataclass
class Host:
    """An agent that looks as `HostAgent` does, at chips which the test takes and gives back."""

    taken: tuple[str, ...] = ()
    looks: list[float] = field(default_factory=list)

    @property
    def wait_chips_free(self) -> Remote:
        return Remote(self._wait)

    async def _wait(self, timeout_s: float) -> tuple[str, ...]:
        self.looks.append(timeout_s)
        return await wait_chips_free(lambda: self.taken, timeout_s)


@dataclass
class Directory:
    """Notes what is held against slices."""

    failures: list[tuple[str, str, frozenset[str], FaultCause, str]] = field(default_factory=list)

    @property
    def note_failure(self) -> Remote:
        return Remote(self._note)

    async def _note(
        self, life: str, whole: Slice, suspects: frozenset[str], cause: FaultCause, reason: str
    ) -> None:
        self.failures.append((life, whole.name, suspects, cause, reason))


async def held(directory: Directory, hosts: list[Host]) -> HeldSlices:
    """A slice of two hosts of four chips, held and watched."""
    observed = tuple(
        ObservedHost(f"n{number}", "", "spot-0", number, 4, 4, is_draining=False, labels={})
        for number in range(2)
    )
    reservation = Reservation((Slice("spot-0", observed),), PlacementGroup.empty())
    spec = SliceSpec("spot", slice_shape("v6e", "2x4", 4), work=Work("m", "engine", "life-1"))
    made = HeldSlices(reservation, spec, SECRET, directory)  # type: ignore[arg-type]
    made.watches[0].listen([], hosts)
    return made


async def test_chips_that_stay_taken_past_the_bound_give_the_slice_up_with_the_reason() -> None:
    directory, hosts = Directory(), [Host(), Host((TAKEN,))]
    slices = await held(directory, hosts)
    assert await slices.chips_in_use() == f"host 1: {TAKEN}"
    reason = f"its chips are not free after {BOUND_S:g} s: host 1: {TAKEN}"
    with pytest.raises(ProbeFailedError) as caught:
        await slices.wait_chips_free(BOUND_S)
    assert str(caught.value) == reason
    # The session leaves it for this cause and begins anew; nobody comes to it in the meantime.
    assert caught.value.cause == EndCause.BOOT_FAILED
    assert slices.watches[0].end == (EndCause.BOOT_FAILED, reason)
    assert slices.ends(caught.value.cause, str(caught.value)) == ((EndCause.BOOT_FAILED, reason),)
    assert directory.failures == [("life-1", "spot-0", frozenset({"n1"}), FaultCause.PROBE, reason)]
    assert [each.looks for each in hosts] == [[0, BOUND_S]] * 2


async def test_chips_that_come_free_within_the_bound_hold_nothing_up() -> None:
    directory, hosts = Directory(), [Host((TAKEN,)), Host()]
    slices = await held(directory, hosts)
    waiting = asyncio.create_task(slices.wait_chips_free(60.0))
    while hosts[0].looks != [60.0]:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    assert not waiting.done()
    hosts[0].taken = ()
    async with asyncio.timeout(30.0):
        await waiting
    assert (directory.failures, slices.watches[0].end) == ([], None)
