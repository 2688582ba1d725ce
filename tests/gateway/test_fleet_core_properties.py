"""Whatever happens to the engines: no token lost, repeated or out of order, and nothing leaks."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.domain.errors import PoisonRequestError, RequestError
from serving.gateway.fleet_core import FleetCore, FleetLimits
from serving.link.messages import Step

from .engines import ScriptedLink, answer_to, core_request

pytestmark = pytest.mark.imports_vllm

MAX_LOSSES = 4

operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 30)),
    st.tuples(st.just("add_engine"), st.just(0)),
    st.tuples(st.just("step"), st.integers(0, 9)),
    st.tuples(st.just("steps"), st.integers(0, 9)),
    st.tuples(st.just("hold_step"), st.integers(0, 9)),
    st.tuples(st.just("break_link"), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("drain"), st.integers(0, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)


class World:
    """A fleet client, its engines, and what was asked of it."""

    def __init__(self) -> None:
        self.core = FleetCore("demo", FleetLimits(600.0, MAX_LOSSES), ("generate",))
        self.core.set_failure_sink(self._on_failure)
        self.links: list[ScriptedLink] = []
        self.wanted: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.failed: dict[str, RequestError] = {}
        self.num_lost = 0
        self._num_links = 0
        self._held: list[tuple[str, Step]] = []  # steps on their way from an engine

    def _on_failure(self, request_id: str, error: RequestError) -> None:
        assert request_id not in self.failed
        self.failed[request_id] = error

    async def apply(self, operation: str, argument: int) -> None:
        if operation == "submit":
            request_id = f"r{len(self.wanted)}"
            self.wanted[request_id] = argument
            await self.core.add_request_async(core_request(request_id, argument))
        elif operation == "add_engine":
            self._num_links += 1
            self.links.append(ScriptedLink(self.core, f"e{self._num_links}"))
        elif operation == "abort" and self.wanted:
            request_id = list(self.wanted)[argument % len(self.wanted)]
            self.core.abort_requests([request_id])
            self.aborted.add(request_id)
        elif self.links:
            self._apply_to_link(operation, self.links[argument % len(self.links)])

    def _apply_to_link(self, operation: str, link: ScriptedLink) -> None:
        if operation == "lose":
            self.links.remove(link)
            self.num_lost += 1
            link.end()
            self._deliver_held(link)  # too late
        elif operation == "drain":
            self.core.drain_engine(link.engine_id, "scaling down", 0.0)
        elif operation == "break_link":
            link.is_broken = True
        elif link.is_broken:
            return
        elif operation == "hold_step":
            self._held.append((link.engine_id, link.make_step()))
        else:
            self._deliver_held(link)
            link.step(1 if operation == "step" else 6)

    def _deliver_held(self, link: ScriptedLink) -> None:
        due = [entry for entry in self._held if entry[0] == link.engine_id]
        self._held = [entry for entry in self._held if entry[0] != link.engine_id]
        for engine_id, step in due:
            self.core.take_step(engine_id, step)

    async def finish(self) -> None:
        """Lets everything that was left run to its end on healthy engines."""
        for link in list(self.links):
            if link.is_broken:
                self._apply_to_link("lose", link)
        await self.apply("add_engine", 0)
        while self.core.num_in_flight:
            before = self.core.num_in_flight
            for link in self.links:
                for _ in range(31):
                    self._apply_to_link("step", link)
            assert self.core.num_in_flight < before, "nothing moves any more"
        for link in self.links:
            self._deliver_held(link)

    async def tokens(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {request_id: [] for request_id in self.wanted}
        while not self.core._outputs.empty():
            for output in (await self.core.get_output_async()).outputs:
                tokens[output.request_id] += output.new_token_ids
        return tokens


@settings(max_examples=300, deadline=None)
@given(st.lists(operations, max_size=60))
def test_every_token_comes_once_and_in_order_and_the_tables_end_empty(
    script: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        world = World()
        for operation, argument in script:
            await world.apply(operation, argument)
        await world.finish()
        for request_id, tokens in (await world.tokens()).items():
            whole = answer_to(request_id, world.wanted[request_id])
            if request_id in world.aborted or request_id in world.failed:
                assert tokens == whole[: len(tokens)]
            else:
                assert tokens == whole
        assert world.core.num_in_flight == 0
        assert world.core.num_waiting == 0
        assert all(not seat.flights for seat in world.core.seats)
        assert all(not link.running for link in world.links if not link.is_broken)
        # Nobody fails for less than the allowance of engines.
        assert all(isinstance(error, PoisonRequestError) for error in world.failed.values())
        assert not world.failed or world.num_lost >= MAX_LOSSES
        world.core.shutdown()

    asyncio.run(run())
