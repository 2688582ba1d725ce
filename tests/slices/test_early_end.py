"""A replica that Serve ends before it has served leaves nothing behind it."""

import asyncio
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from serving.app import engine_spec
from serving.config.application import LinkConfig, check_app_config
from serving.directory.deployment import FleetDirectory
from serving.domain.slice_lifecycle import EndCause, SliceState
from serving.engine.spec import EngineSpec
from serving.slices.replica import SliceReplica
from tests.kuberay.ray_by_hand import RayByHand, standing_in
from tests.kuberay.replicas import until

# The collector of garbage calls `__del__` too, and does not await it as Serve does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine 'SliceReplica.__del__'"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class DirectoryHandle:
    """Calls a directory in this process, as Serve's handle does one elsewhere."""

    def __init__(self, directory: FleetDirectory) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._directory, name), options=lambda **_: self)


@pytest.fixture
async def directory() -> AsyncIterator[FleetDirectory]:
    made = RayByHand(random.Random(1))
    context = SimpleNamespace(app_name="slicewise", replica_tag="replica-1")
    with standing_in(made, "slicewise"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "get_replica_context", lambda: context)
        directory = FleetDirectory.__new__(FleetDirectory)
        await directory.__init__(LinkConfig())  # type: ignore[misc] # as Serve does
        yield directory
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def spec_of_a_slice() -> EngineSpec:
    slices = {"generation": "v6e", "topology": "2x4"}
    deployment = {"compute_class": "spot", "slice": slices}
    model = {"name": "m", "source": "models/slicewise-demo", "engine": "paced"}
    config = check_app_config({"models": [model | {"deployments": [deployment]}]}, None)
    return engine_spec(config, config.models[0], config.models[0].deployments[0])


async def test_one_that_waits_for_a_slice_tells_the_directory_that_it_is_gone(
    directory: FleetDirectory,
) -> None:
    replica = SliceReplica.__new__(SliceReplica)
    handle: Any = DirectoryHandle(directory)
    starting = asyncio.create_task(
        replica.__init__(spec_of_a_slice(), LinkConfig(), handle)  # type: ignore[misc]
    )

    async def states() -> list[SliceState]:
        return [each.state for each in (await directory.watch("", 0.0)).records]

    async def is_waiting() -> bool:
        return await states() == [SliceState.REQUESTED]

    await until(is_waiting, "it waits for a slice")
    await replica.__del__()
    assert await states() == []
    with pytest.raises(asyncio.CancelledError):
        await starting
    (ended,) = (await directory.watch("", 0.0)).ended
    assert ended.life.cause is EndCause.RELEASED


async def test_one_that_has_not_begun_ends_without_a_word(directory: FleetDirectory) -> None:
    replica = SliceReplica.__new__(SliceReplica)
    await replica.__del__()
    assert (await directory.watch("", 0.0)).records == ()
