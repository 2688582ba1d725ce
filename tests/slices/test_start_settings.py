"""Settings that do not come from the first host end the start in time, with the reason."""

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from ray.util.placement_group import placement_group

from serving.config.slice_spec import SliceSpec
from serving.domain.topology import slice_shape
from serving.engine.spec import EngineSpec, TpuSpec
from serving.link.engine_protocol import EngineDiedError
from serving.slices.engine_hosts import resolve_on_first_host, settings_in_time
from serving.slices.reservation import Reservation

SPEC = EngineSpec(
    "m",
    "org/m",
    "spot",
    slice=SliceSpec("spot", slice_shape("v6e", "2x2")),
    tpu=TpuSpec(None),
)


@pytest.fixture
def reservation() -> Iterator[Reservation]:
    """A bundle of this machine, held as a reservation holds the host of a slice."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        group = placement_group([{"CPU": 1}])
        ray.get(group.ready())
        slices = (SimpleNamespace(hosts=[SimpleNamespace(worker_id=0)], name="spot-0"),)
        yield Reservation(slices, group)  # type: ignore[arg-type]
    finally:
        ray.shutdown()


async def test_settings_that_take_too_long_are_given_up_and_the_reason_says_where() -> None:
    never: asyncio.Future[EngineSpec] = asyncio.get_running_loop().create_future()
    ended: list[str] = []
    with pytest.raises(EngineDiedError) as caught:
        await settings_in_time(never, 0.05, "spot-0", lambda: ended.append("work"))
    assert str(caught.value) == (
        "the settings of the engine were not there after 0.05 s: on host 0 of spot-0 no process "
        "started, or the model's config.json did not come"
    )
    assert ended == ["work"]


async def test_slice_lost_meanwhile_ends_the_work_for_settings() -> None:
    never: asyncio.Future[EngineSpec] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()
    waiting = asyncio.create_task(settings_in_time(never, 3600.0, "spot-0", ended.set))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_settings_that_come_or_are_refused_are_passed_on() -> None:
    async def come() -> EngineSpec:
        return SPEC

    async def refused() -> EngineSpec:
        raise ValueError("does not fit")

    ended: list[str] = []
    assert await settings_in_time(come(), 60.0, "spot-0", lambda: ended.append("work")) is SPEC
    with pytest.raises(ValueError, match="does not fit"):
        await settings_in_time(refused(), 60.0, "spot-0", lambda: ended.append("work"))
    assert ended == []


@pytest.mark.process
@pytest.mark.long
async def test_file_that_never_comes_ends_the_start_of_a_real_host(
    reservation: Reservation,
) -> None:
    """Whoever asks for the model's file is connected and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "HF_HUB_ETAG_TIMEOUT": "3600",
            "HF_HUB_OFFLINE": "0",
        }
        spec = replace(SPEC, engine_env=environment, start_timeout_s=20.0)
        with pytest.raises(EngineDiedError, match=r"not there after 20 s: on host 0 of spot-0"):
            async with asyncio.timeout(120.0):
                await resolve_on_first_host(spec, reservation)
