"""One engine, its links and the watch over both, with the paced engine and real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from serving.engine.host import EngineHost, StepSigns, is_at_work, start_engine
from serving.engine.host_actor import EngineHostActor
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.engine.spec import EngineSpec
from serving.link.client import LinkCallbacks, LinkClient
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import Draining, EngineEnd, Step, TokenRequest

SECRET = b"the cluster secret of these tests"
DEADLINE_S = 15.0

# Looks often and gives up soon: a hang is what these tests wait for.
SPEC = EngineSpec(
    model="paced",
    source="models/slicewise-demo",
    compute_class="local",
    paced={},
    check_period_s=0.05,
    hang_timeout_s=0.25,
)


@dataclass
class Peer:
    """A gateway's end of one link, and what it heard."""

    tokens: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    drained: list[Draining] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    client: LinkClient | None = None

    async def connect(self, address: tuple[str, int]) -> LinkClient:
        callbacks = LinkCallbacks(self._on_lost, self._on_draining)
        self.client = await LinkClient.connect(
            address, gateway_id="gw", secret=SECRET, callbacks=callbacks
        )
        self.client.deliver_to(self._on_step)
        return self.client

    async def until_lost(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while not self.lost:
                await self.changed.wait()
                self.changed.clear()
        return self.lost[0]

    def _on_step(self, step: Step) -> None:
        self.tokens += [token for output in step.outputs for token in output.token_ids]
        self.changed.set()

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.changed.set()

    def _on_draining(self, draining: Draining) -> None:
        self.drained.append(draining)
        self.changed.set()


@asynccontextmanager
async def hosted(engine: PacedEngine) -> AsyncIterator[tuple[EngineHost, Peer]]:
    host = EngineHost(SPEC, engine, SECRET)
    peer = Peer()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await peer.connect(await host.listen("127.0.0.1"))
            yield host, peer
    finally:
        if peer.client is not None:
            await peer.client.close()
        await host.close()


async def test_engine_is_served_under_the_hosts_engine_id() -> None:
    engine = PacedEngine(PacedConfig())
    async with hosted(engine) as (host, peer):
        assert peer.client is not None
        assert peer.client.engine_id == host.engine_id
        assert host.server.gateway_ids == {"gw"}
        peer.client.submit(TokenRequest("r", [1], max_tokens=3))
        while len(peer.tokens) < 3:
            await peer.changed.wait()
            peer.changed.clear()
        assert host.server.num_requests == 0
        host.ensure_alive()


async def test_death_of_the_engine_ends_the_links_and_is_told_with_its_reason() -> None:
    engine = PacedEngine(PacedConfig())
    async with hosted(engine) as (host, peer):
        engine.die("out of memory")
        assert "out of memory" in await peer.until_lost()
        assert "out of memory" in await host.wait_died()
        with pytest.raises(EngineDiedError, match="out of memory"):
            host.ensure_alive()


async def test_host_that_is_told_to_end_tells_its_gateways_that_the_engine_is_lost() -> None:
    engine = PacedEngine(PacedConfig())
    async with hosted(engine) as (host, peer):
        host.end("engine host got SIGTERM")
        host.end("a second word changes nothing")
        assert "engine host got SIGTERM" in await peer.until_lost()
        assert await host.wait_died() == "engine host got SIGTERM"
        with pytest.raises(EngineDiedError, match="SIGTERM"):
            host.ensure_alive()
        assert peer.client is not None
        assert peer.client.has_reported_end


async def test_crash_and_hang_and_an_end_from_outside_are_told_apart() -> None:
    ends: list[tuple[Callable[[PacedEngine, EngineHost], None], EngineEnd]] = [
        (lambda engine, _: engine.die("out of memory"), EngineEnd.CRASHED),
        (lambda engine, _: engine.hang(), EngineEnd.HUNG),
        (lambda _, host: host.end("engine host got SIGTERM"), EngineEnd.TOLD),
    ]
    for end, told in ends:
        engine = PacedEngine(PacedConfig())
        async with hosted(engine) as (host, peer):
            end(engine, host)
            await peer.until_lost()
            assert peer.client is not None
            assert peer.client.reported_end == told


async def test_close_of_a_host_is_no_crash_of_its_engine() -> None:
    async with hosted(PacedEngine(PacedConfig())) as (host, peer):
        await host.close()
        await peer.until_lost()
        assert peer.client is not None
        assert peer.client.reported_end == EngineEnd.TOLD


class WorkingEngine(PacedEngine):
    """An engine in a long step: it does not answer, and its processes are busy meanwhile.

    Or they compile, which nobody sees them do: `program`.
    """

    def __init__(self, *, share: float, program: str | None = None) -> None:
        super().__init__(PacedConfig())
        self._share, self.num_unanswered, self._program = share, 0, program
        self.unanswered = asyncio.Event()

    def compiling(self, since_s: float) -> str | None:  # type: ignore[override] # as `busy_s`
        assert since_s <= asyncio.get_running_loop().time()
        return self._program

    def busy_s(self) -> float:  # type: ignore[override] # the paced engine has none
        return asyncio.get_running_loop().time() * self._share

    async def check(self, timeout_s: float) -> None:
        try:
            await super().check(timeout_s)
        except EngineDiedError:
            self.num_unanswered += 1
            self.unanswered.set()
            raise


@pytest.mark.parametrize(("share", "program"), [(0.9, None), (0.0, "jit(sample)")])
async def test_engine_that_does_not_answer_and_works_is_left_to_end_its_step(
    share: float, program: str | None
) -> None:
    engine = WorkingEngine(share=share, program=program)
    async with hosted(engine) as (host, peer):
        engine.hang()
        async with asyncio.timeout(DEADLINE_S):
            await engine.unanswered.wait()
        engine.unhang()
        peer.client.submit(TokenRequest("r", [1], max_tokens=3))  # type: ignore[union-attr]
        async with asyncio.timeout(DEADLINE_S):
            while len(peer.tokens) < 3:
                await peer.changed.wait()
                peer.changed.clear()
        host.ensure_alive()
        assert peer.lost == []


async def test_engine_that_computes_without_an_end_hangs_after_six_times_its_time() -> None:
    engine = WorkingEngine(share=1.0)
    async with hosted(engine) as (_, peer):
        engine.hang()
        await peer.until_lost()
        assert engine.num_unanswered > 2


@pytest.mark.parametrize(
    ("busy_share", "program", "silent_s", "at_work"),
    [
        (None, None, 20.0, False),  # nobody knows: it hangs
        (0.05, None, 20.0, False),  # it waits for something
        (0.49, None, 20.0, False),
        (0.5, None, 20.0, True),
        (3.0, None, 119.0, True),
        (3.0, None, 120.0, False),  # six times as long as it may be silent
        (0.05, "jit(sample)", 20.0, True),  # on Ray's workers, whose work is not seen
        (None, "jit(sample)", 119.0, True),
        (0.05, "jit(sample)", 120.0, False),
    ],
)
def test_long_step_is_told_from_a_hang_by_what_it_computes(
    busy_share: float | None, program: str | None, silent_s: float, *, at_work: bool
) -> None:
    assert is_at_work(StepSigns(silent_s, busy_share, program), 20.0) is at_work


async def test_engine_that_stops_turning_is_noticed_and_ended() -> None:
    engine = PacedEngine(PacedConfig())
    async with hosted(engine) as (host, peer):
        engine.hang()
        assert "turn" in await peer.until_lost()
        assert "turn" in await host.wait_died()
        with pytest.raises(EngineDiedError):
            await engine.check(DEADLINE_S)


async def test_pause_shorter_than_the_hang_timeout_is_forgiven() -> None:
    engine = PacedEngine(PacedConfig())
    async with hosted(engine) as (host, peer):
        assert peer.client is not None
        engine.stall_for(SPEC.check_period_s)
        peer.client.submit(TokenRequest("r", [1], max_tokens=3))
        while len(peer.tokens) < 3:
            await peer.changed.wait()
            peer.changed.clear()
        host.ensure_alive()
        assert peer.lost == []


async def test_drain_is_told_to_every_gateway() -> None:
    async with hosted(PacedEngine(PacedConfig())) as (host, peer):
        host.server.drain("scaling down", 3.0)
        while not peer.drained:
            await peer.changed.wait()
            peer.changed.clear()
        assert (peer.drained[0].reason, peer.drained[0].grace_s) == ("scaling down", 3.0)


async def test_close_ends_links_and_engine_and_may_be_repeated() -> None:
    engine = PacedEngine(PacedConfig())
    async with hosted(engine) as (host, peer):
        await host.close()
        await host.close()
        await peer.until_lost()
        assert await host.wait_died() == "closed"
        with pytest.raises(EngineDiedError):
            await engine.check(DEADLINE_S)


async def test_engine_that_dies_while_being_closed_leaves_nothing_open() -> None:
    engine = PacedEngine(PacedConfig())
    async with hosted(engine) as (host, peer):
        engine.die("at the worst moment")
        await host.close()
        await peer.until_lost()
        assert await host.wait_died()


async def test_spec_with_a_pace_starts_the_paced_engine() -> None:
    engine = await start_engine(EngineSpec("m", "nowhere", "local", paced={"max_model_len": 64}))
    assert engine.info["max_model_len"] == 64
    assert engine.cached is None
    await engine.close()
    adapters = (("poet", "/adapters/poet"),)
    cached = {"prefill_tokens_per_s": 1e6, "kv_cache_tokens": 8192}
    engine = await start_engine(
        EngineSpec("m", "nowhere", "local", paced=cached, adapters=adapters)
    )
    assert engine.cached is not None
    assert engine.cached.layout.adapters == adapters
    await engine.close()


async def test_request_on_its_way_when_the_engine_is_told_to_drain_is_answered() -> None:
    """A gateway has let it in, and not sent it yet, when it hears that the engine drains."""
    actor = EngineHostActor(replace(SPEC, listens_on_loopback=True), SECRET, "0" * 36)
    peer = Peer()
    try:
        async with asyncio.timeout(DEADLINE_S):
            client = await peer.connect((await actor.start()).address)
            draining = asyncio.create_task(actor.drain("the replica leaves", 0.05, stay_s=10.0))
            while not peer.drained:
                await peer.changed.wait()
                peer.changed.clear()
            client.submit(TokenRequest("late", [1], max_tokens=3))
            await draining
        assert len(peer.tokens) == 3
        assert peer.lost == []
    finally:
        if peer.client is not None:
            await peer.client.close()
        await actor.close()
