"""Versions and engines of a model come and go in any order: no request is lost, doubled or mixed.

The versions are built once, by vLLM; engines are scripted. What is drawn is all that happens.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.model_version import ModelVersion
from serving.gateway.served_model import ServedModel

from .engines import RecordingSink, ScriptedLink, answer_to, in_flight

pytestmark = pytest.mark.imports_vllm

# Requests wait for as long as an example takes, and are not given up.
GATEWAY = GatewayConfig(request_deadline_s=3600.0, max_engine_losses=100, max_behind_s=600.0)
TARGET = RequestTarget("demo", "somebody")
NUM_VERSIONS = 3
_NUMBERS = count()

operations = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 12)),
    st.tuples(st.just("ask"), st.integers(1, 12)),
    st.tuples(st.just("update"), st.integers(0, NUM_VERSIONS - 1)),
    st.tuples(st.just("register"), st.integers(0, NUM_VERSIONS - 1)),
    st.tuples(st.just("step"), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("drain"), st.integers(0, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)
scripts = st.lists(operations, max_size=40)


def model(seed: int) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "name": "demo",
            "source": "models/slicewise-demo",
            "engine": "paced",
            "paced": {"model_seed": seed},
            "deployments": ({"compute_class": "local"},),
        }
    )


MODELS = [model(seed) for seed in range(1, NUM_VERSIONS + 1)]


class Stage:
    """A model of which all versions are built."""

    def __init__(self, versions: ServedModel) -> None:
        self.versions = versions
        self.built: list[ModelVersion] = []

    @classmethod
    async def build(cls) -> "Stage":
        stage = cls(await ServedModel.build(MODELS[0], GATEWAY))
        for each in MODELS:
            await stage.versions.update(each)
            stage.built.append(stage.versions.current)
        return stage

    async def play(self, script: list[tuple[str, int]]) -> None:
        play = Play(self)
        try:
            await self.versions.update(MODELS[0])
            for operation, argument in script:
                await play.apply(operation, argument)
            await play.finish()
            play.check()
        finally:
            play.clear()


class Play:
    """One script: what was asked of which version, and the engines."""

    def __init__(self, stage: Stage) -> None:
        self.versions, self.built = stage.versions, stage.built
        self.sinks = [RecordingSink(version.dispatcher) for version in self.built]
        self.links: list[tuple[int, ScriptedLink]] = []  # with their versions
        self.ended: list[tuple[int, ScriptedLink]] = []
        self.asked: dict[str, tuple[int, int]] = {}  # version and tokens
        self.aborted: set[str] = set()

    async def apply(self, operation: str, argument: int) -> None:
        if operation == "ask":
            await self._ask(argument)
        elif operation == "update":
            await self.versions.update(MODELS[argument])
        elif operation == "register":
            await self._register(argument, places=3)
        elif operation == "abort" and self.asked:
            request_id = list(self.asked)[argument % len(self.asked)]
            self.aborted.add(request_id)
            self.built[self.asked[request_id][0]].dispatcher.abort([request_id])
        elif self.links:
            version, link = self.links[argument % len(self.links)]
            if operation == "step":
                link.step()
            elif operation == "lose":
                self.links.remove((version, link))
                self.ended.append((version, link))
                link.end()
            elif operation == "drain":
                dispatcher = self.built[version].dispatcher
                dispatcher.drain_engine(link.engine_id, "the script says so", 0.0)

    async def _ask(self, num_tokens: int) -> None:
        ready = self.ready()
        if not any(ready):
            return  # it would wait in front of the model
        app = await self.versions.enter(TARGET)
        apps = [await version.app() for version in self.built]
        (version,) = [at for at, each in enumerate(apps) if each is app]
        assert ready[version], "it has no engine, and another one has"
        request_id = f"r{next(_NUMBERS)}"
        self.asked[request_id] = version, num_tokens
        dispatcher = self.built[version].dispatcher
        dispatcher.submit(in_flight(dispatcher, request_id, num_tokens))

    async def _register(self, version: int, places: int) -> None:
        config = MODELS[version]
        info: dict[str, Any] = {
            "version": config.version_id,
            "described": config.model_dump(mode="json"),
        }
        dispatcher = await self.versions.register_engine(info)
        assert dispatcher is self.built[version].dispatcher
        link = ScriptedLink(dispatcher, f"e{next(_NUMBERS)}", places=places)
        self.links.append((version, link))

    def ready(self) -> list[int]:
        return [version.dispatcher.num_ready for version in self.built]

    async def finish(self) -> None:
        """Gives every version an engine that lasts, and lets all end."""
        for version in range(NUM_VERSIONS):
            await self._register(version, places=1000)
        for _ in range(len(self.asked) * 15 + 15):
            if not any(version.dispatcher.num_in_flight for version in self.built):
                return
            for _, link in self.links:
                link.step()
        raise AssertionError("something never ends")

    def check(self) -> None:
        for request_id, (version, num_tokens) in self.asked.items():
            tokens = self.sinks[version].tokens.get(request_id, [])
            whole = answer_to(request_id, num_tokens)
            assert tokens == (whole[: len(tokens)] if request_id in self.aborted else whole)
        for version, sink in enumerate(self.sinks):
            assert not sink.failures
            assert all(self.asked[request_id][0] == version for request_id in sink.tokens)
        for version, link in self.links + self.ended:
            taken = [each.request_id.partition("~")[0] for each in link.submitted]
            assert all(self.asked[request_id][0] == version for request_id in taken)
        running = Counter(
            wire_id.partition("~")[0] for _, link in self.links for wire_id in link.running
        )
        assert not running
        assert self.versions.num_waiting == 0

    def clear(self) -> None:
        for version in self.built:
            version.dispatcher.abort(list(self.asked))
        for _, link in self.links:
            link.end()


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[asyncio.Runner, Stage]]:
    with asyncio.Runner() as runner:
        built = runner.run(Stage.build())
        yield runner, built
        built.versions.close()


@settings(max_examples=100, deadline=None)
@given(script=scripts)
def test_no_request_is_lost_or_doubled_or_changes_its_version(
    stage: tuple[asyncio.Runner, Stage], script: list[tuple[str, int]]
) -> None:
    runner, built = stage
    runner.run(built.play(script))


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(script=scripts)
def test_of_many_more_draws_none_is_lost_or_doubled_or_changes_its_version(
    stage: tuple[asyncio.Runner, Stage], script: list[tuple[str, int]]
) -> None:
    runner, built = stage
    runner.run(built.play(script))
