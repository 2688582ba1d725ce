"""When traffic may come to a cluster's gateways: the decision, and what its keeper remembers."""

import asyncio
from dataclasses import replace

import pytest

from serving.config.models import DeploymentConfig, ModelConfig
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.gateway.edge.readiness import (
    QUIET_S,
    ReadinessFacts,
    decide_readiness,
    required_engines,
)
from serving.gateway.edge.readiness_keeper import ReadinessKeeper

DEADLINE_S = 10.0
FIRST_INSTALL = ReadinessFacts(
    num_ready=0, num_required=4, replicas={"provisioning": 4}, quiet_s=None, is_open=False
)
NOTHING_WANTED = ReadinessFacts(
    num_ready=0, num_required=0, replicas={}, quiet_s=QUIET_S, is_open=False
)


def model(*deployments: dict[str, object]) -> ModelConfig:
    return ModelConfig(
        name="demo",
        source="demo",
        deployments=tuple(DeploymentConfig.model_validate(each) for each in deployments),
    )


def record(replica: str, state: SliceState) -> SliceRecord:
    life = SliceLifecycle.begin(0.0).enter(state, 1.0, "")
    return SliceRecord(replica_id=replica, model="demo", compute_class="spot", life=life)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(FIRST_INSTALL, num_ready=1), "engines take requests"),
        (replace(FIRST_INSTALL, is_open=True), "this cluster has served before"),
        (NOTHING_WANTED, "no engine is wanted: the first request asks for one"),
    ],
    ids=["one engine of four", "stock-out after it has served", "scale from zero"],
)
def test_gateways_are_ready_while_the_cluster_can_serve(facts: ReadinessFacts, reason: str) -> None:
    ready = decide_readiness(facts)
    assert ready.is_ready
    assert reason in ready.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (FIRST_INSTALL, "4 wanted at least; slice replicas: 4 provisioning"),
        (replace(FIRST_INSTALL, replicas={}), "4 wanted at least; slice replicas: none yet"),
        (replace(FIRST_INSTALL, num_required=None, replicas={}), "directory has not answered"),
        (replace(NOTHING_WANTED, quiet_s=None), "has to last 30 s"),
        (replace(NOTHING_WANTED, quiet_s=QUIET_S - 1), "has to last 30 s"),
        (
            replace(NOTHING_WANTED, replicas={"loading": 1}, quiet_s=None),
            "0 wanted at least; slice replicas: 1 loading",
        ),
    ],
    ids=["no slice yet", "no replica yet", "no directory", "just listed", "just quiet", "loading"],
)
def test_gateways_are_not_ready_before_the_first_engine(facts: ReadinessFacts, reason: str) -> None:
    ready = decide_readiness(facts)
    assert not ready.is_ready
    assert reason in ready.reason


def test_required_engines_are_those_that_no_policy_may_take_away() -> None:
    fixed = model({"compute_class": "reserved", "replicas": 2})
    scaled = model(
        {"compute_class": "spot", "min_replicas": 1, "max_replicas": 4},
        {"compute_class": "flex-start", "min_replicas": 0, "max_replicas": 4},
    )
    assert required_engines([fixed, scaled]) == 3


class ClusterLatch:
    """The store of a Ray cluster, in this process; while it is away every call fails."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_away = False
        self.num_looks = 0

    def is_set(self) -> bool:
        self.num_looks += 1
        self._reach()
        return self.is_open

    def set(self) -> None:
        self._reach()
        self.is_open = True

    def _reach(self) -> None:
        if self.is_away:
            raise ConnectionError("the head is away")


class OneGateway:
    """A keeper whose engines and clock are set by hand."""

    def __init__(self, latch: ClusterLatch) -> None:
        self.num_ready = 0
        self.now_s = 100.0
        self.keeper = ReadinessKeeper(latch, lambda: self.num_ready, lambda: self.now_s)

    @property
    def is_ready(self) -> bool:
        return self.keeper.readiness().is_ready


async def test_first_engine_opens_the_cluster_and_its_loss_does_not_close_it() -> None:
    latch = ClusterLatch()
    first = OneGateway(latch)
    first.keeper.set_models([model({"compute_class": "spot", "replicas": 2})])
    first.keeper.set_snapshot(Snapshot("1", (record("a", SliceState.PROVISIONING),)))
    assert not first.is_ready
    first.num_ready = 1
    async with asyncio.timeout(DEADLINE_S):
        await first.keeper.open_when_ready()
    first.num_ready = 0
    assert first.is_ready
    # A gateway that starts during the stock-out learns it from the cluster's store.
    second = OneGateway(latch)
    assert not second.is_ready
    async with asyncio.timeout(DEADLINE_S):
        await second.keeper.open_when_ready()
    assert second.is_ready


async def test_scale_from_zero_opens_once_and_queues_while_the_first_engine_comes() -> None:
    gateway = OneGateway(ClusterLatch())
    gateway.keeper.set_models(
        [model({"compute_class": "spot", "min_replicas": 0, "max_replicas": 2})]
    )
    gateway.keeper.set_snapshot(Snapshot("1"))
    assert not gateway.is_ready
    gateway.now_s += QUIET_S
    assert gateway.is_ready
    async with asyncio.timeout(DEADLINE_S):
        await gateway.keeper.open_when_ready()
    gateway.keeper.set_snapshot(Snapshot("2", (record("a", SliceState.PROVISIONING),)))
    assert gateway.is_ready


def test_quiet_begins_anew_after_a_replica_was_listed() -> None:
    gateway = OneGateway(ClusterLatch())
    gateway.keeper.set_models(
        [model({"compute_class": "spot", "min_replicas": 0, "max_replicas": 2})]
    )
    gateway.keeper.set_snapshot(Snapshot("1"))
    gateway.now_s += QUIET_S - 1
    gateway.keeper.set_snapshot(Snapshot("2", (record("a", SliceState.PROVISIONING),)))
    gateway.keeper.set_snapshot(Snapshot("3"))
    gateway.now_s += 2
    assert not gateway.is_ready


async def test_ready_gateway_opens_the_cluster_once_the_head_is_back() -> None:
    latch = ClusterLatch()
    latch.is_away = True
    gateway = OneGateway(latch)
    opening = asyncio.create_task(gateway.keeper.open_when_ready())
    async with asyncio.timeout(DEADLINE_S):
        while not latch.num_looks:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        gateway.num_ready = 1
        latch.is_away = False
        await opening
    assert latch.is_open
