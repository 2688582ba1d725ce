"""A model in two versions at one gateway, on the shipped model's configuration, engines by hand."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.errors import GatewayBehindError, NoEngineInTimeError, VersionRetiredError
from serving.domain.tokens.block_hashes import first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, joined
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.served_model import ServedModel, VersionUnknownError
from serving.link.messages import CacheDelta, CacheSnapshot, EngineStats

from .core_requests import core_request
from .engines import ScriptedLink

pytestmark = pytest.mark.imports_vllm

# A version is built while a token lies unread, which takes seconds on a busy machine: the gateway
# must not call itself behind for it, except where a test wants that.
GATEWAY = GatewayConfig(request_deadline_s=0.05, max_behind_s=600.0)
TARGET = RequestTarget("demo", "somebody")


def model(seed: int, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "name": "demo",
            "source": "models/slicewise-demo",
            "engine": "paced",
            "paced": {"model_seed": seed},
            "deployments": ({"compute_class": "local"},),
        }
        | changes
    )


OLD, NEW = model(1), model(2)


def info_of(config: ModelConfig) -> dict[str, Any]:
    """What an engine of this version says of itself."""
    return {"version": config.version_id, "described": config.model_dump(mode="json")}


async def engine_of(versions: ServedModel, config: ModelConfig, name: str) -> ScriptedLink:
    return ScriptedLink(await versions.register_engine(info_of(config)), name)


def ready(versions: ServedModel) -> dict[str, int]:
    return {row["version"]: row["ready"] for row in versions.describe()["versions"]}


async def test_request_stays_with_its_version_when_the_model_is_replaced() -> None:
    versions = await ServedModel.build(OLD, GATEWAY)
    old = await engine_of(versions, OLD, "old")
    app = await versions.enter(TARGET)
    version = versions.current
    await version.client.add_request_async(core_request("r", 5))
    old.step()
    await versions.update(NEW)
    new = await engine_of(versions, NEW, "new")
    # The old engine goes; the new one is idle, and does not get the request.
    version.dispatcher.drain_engine("old", "the replica is leaving", 5.0)
    assert new.running == []
    assert old.running == ["r"]
    old.step(4)
    assert version.dispatcher.num_in_flight == 0
    assert await versions.enter(TARGET) is not app
    versions.close()


async def test_what_engines_of_another_version_have_cached_counts_for_none_of_ours() -> None:
    """Their blocks have the same names and other contents."""
    layout = CacheLayout.of_blocks(16, first_parent())
    prompt = list(range(250)) * 3
    known = joined(NamedBlocks(prompt).keys(layout))

    async def engine_with(config: ModelConfig, name: str, keys: bytes) -> ScriptedLink:
        dispatcher = await versions.register_engine(info_of(config))
        link = ScriptedLink(dispatcher, name, places=9, cache_layout=layout)
        link.on_cache(CacheSnapshot(keys, is_first=True))
        return link

    versions = await ServedModel.build(OLD, GATEWAY)
    before = versions.current
    old = await engine_with(OLD, "old", known)
    await before.client.add_request_async(core_request("a", 50, prompt))
    old.step()
    await versions.update(NEW)
    new = await engine_with(NEW, "new", b"")
    await versions.current.client.add_request_async(core_request("b", 50, prompt))
    assert new.running == ["b"]
    chosen = versions.current.dispatcher.telemetry_of("b")
    assert chosen is not None
    assert chosen.choice is not None
    assert chosen.choice.expected_cached == 0
    # One of the old version that moves finds its beginning at another engine of that.
    new.on_cache(CacheDelta(known, b""))
    await engine_with(OLD, "empty", b"")
    has_it = await engine_with(OLD, "has it", known)
    old.end()
    assert has_it.running == ["a~1"]
    moved = before.dispatcher.telemetry_of("a")
    assert moved is not None
    assert moved.choice is not None
    assert moved.choice.expected_cached == 640
    versions.close()


async def test_old_version_takes_requests_until_the_new_one_has_an_engine() -> None:
    versions = await ServedModel.build(OLD, GATEWAY)
    await engine_of(versions, OLD, "old")
    before = await versions.enter(TARGET)
    await versions.update(NEW)
    assert await versions.enter(TARGET) is before
    await engine_of(versions, NEW, "new")
    assert ready(versions) == {OLD.version_id: 1, NEW.version_id: 1}
    assert await versions.enter(TARGET) is not before
    versions.close()


async def test_gateway_that_starts_during_an_upgrade_learns_the_old_version_from_its_engine() -> (
    None
):
    versions = await ServedModel.build(NEW, GATEWAY)
    with pytest.raises(NoEngineInTimeError):
        await versions.enter(TARGET)
    await engine_of(versions, OLD, "old")
    assert ready(versions) == {NEW.version_id: 0, OLD.version_id: 1}
    assert await versions.enter(TARGET) is not await versions.current.app()
    versions.close()


async def test_request_whose_version_is_gone_is_told_so() -> None:
    versions = await ServedModel.build(OLD, GATEWAY)
    old = await engine_of(versions, OLD, "old")
    served = versions.current
    failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    served.client.set_failure_sink(lambda _, error: failed.set_result(error))
    await served.client.add_request_async(core_request("r", 5))
    old.step()
    await versions.update(NEW)
    await engine_of(versions, NEW, "new")
    old.end()
    async with asyncio.timeout(10):
        error = await failed
    assert isinstance(error, VersionRetiredError)
    assert OLD.version_id in error.message
    versions.close()


async def test_version_without_engine_and_request_is_let_go_and_may_come_back() -> None:
    versions = await ServedModel.build(OLD, GATEWAY)
    old = await engine_of(versions, OLD, "old")
    await versions.update(NEW)
    versions.prune()
    assert set(ready(versions)) == {OLD.version_id, NEW.version_id}
    old.end()
    versions.prune()
    assert set(ready(versions)) == {NEW.version_id}
    await versions.update(OLD)
    versions.prune()
    assert set(ready(versions)) == {OLD.version_id}
    versions.close()


async def test_other_frontend_of_the_same_version_keeps_engines_and_requests() -> None:
    versions = await ServedModel.build(OLD, GATEWAY)
    await engine_of(versions, OLD, "old")
    before = await versions.enter(TARGET)
    before_version = versions.current
    await versions.update(model(1, frontend_args={"response_role": "speaker"}))
    assert versions.current is before_version
    assert await versions.enter(TARGET) is not before
    versions.close()


async def test_refused_model_leaves_everything_as_it_was() -> None:
    versions = await ServedModel.build(OLD, GATEWAY)
    await engine_of(versions, OLD, "old")
    with pytest.raises(ValueError, match="nowhere"):
        await versions.update(model(2, source="/nowhere"))
    assert versions.current.version == OLD.version_id
    assert await versions.enter(TARGET)
    versions.close()


async def test_engine_that_cannot_be_served_is_refused() -> None:
    versions = await ServedModel.build(NEW, GATEWAY)
    for told in ({"version": "unknown"}, info_of(OLD) | {"version": "another"}):
        with pytest.raises(VersionUnknownError):
            await versions.register_engine(told)
    assert set(ready(versions)) == {NEW.version_id}
    versions.close()


async def test_gateway_that_is_late_refuses_until_it_has_caught_up() -> None:
    # Whatever nobody has taken is later than this.
    versions = await ServedModel.build(OLD, GatewayConfig(max_behind_s=1e-9))
    link = await engine_of(versions, OLD, "e1")
    await versions.enter(TARGET)
    await versions.current.client.add_request_async(core_request("r", 5))
    link.step()
    with pytest.raises(GatewayBehindError, match="behind with the tokens of 'demo'"):
        await versions.enter(TARGET)
    await versions.current.client.get_output_async()
    await versions.enter(TARGET)
    versions.close()


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_engine_that_shares_its_slice_is_told_of_as_all_engines_on_it(
    num_engines: int,
) -> None:
    """A slice that two engines share does what both do: each is told of as a whole slice."""
    where = {"topology": "2x2", "generation": "v6e", "num_engines": num_engines}
    deployments = ({"compute_class": "local", "slice": where},)
    config = model(1, deployments=deployments)
    versions = await ServedModel.build(config, GATEWAY)
    link = await engine_of(versions, config, "e1")
    rates: list[EngineRate] = []
    for second in range(0, 60, 2):
        sums = EngineStats(
            prompt_tokens=100 * second,
            generation_tokens=50 * second,
            num_steps=20 * second,
            busy_s=0.8 * second,
            is_yours=True,
        )
        link.stats = replace(link.stats, engine_stats=sums)
        rates = versions.engine_rates(float(second))
    (rate,) = rates
    assert rate.prompt_tokens_per_s == pytest.approx(100 * num_engines)
    assert rate.output_tokens_per_s == pytest.approx(50 * num_engines)
    versions.close()
