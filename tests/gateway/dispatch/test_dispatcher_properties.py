"""Whatever happens to the engines: no token lost, repeated or out of order, and nothing leaks."""

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.domain.capacity.objectives import Objectives
from serving.domain.errors import PoisonRequestError
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.link.messages import Step
from tests.gateway.engines import RecordingSink, ScriptedLink, answer_to, in_flight

MAX_LOSSES = 4

operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 30)),
    st.tuples(st.just("submit_batch"), st.integers(1, 30)),
    st.tuples(st.just("submit_urgent"), st.integers(1, 30)),
    st.tuples(st.just("add_engine"), st.integers(0, 4)),
    st.tuples(st.just("places"), st.integers(0, 9)),
    st.tuples(st.just("ask_back"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(0, 9)),
    st.tuples(st.just("steps"), st.integers(0, 9)),
    st.tuples(st.just("hold_step"), st.integers(0, 9)),
    st.tuples(st.just("break_link"), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("drain"), st.integers(0, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)


_CLASSES = {
    "submit": ServiceClass.STANDARD,
    "submit_batch": ServiceClass.BATCH,
    "submit_urgent": ServiceClass.INTERACTIVE,
}


class World:
    """A dispatcher, its engines, and what was asked of it."""

    def __init__(self, ttft_s: float | None = None) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits(600.0, MAX_LOSSES))
        if ttft_s is not None:
            self.dispatcher.telemetry.set_objectives(Objectives(ttft_s, 0.1))
        self.sink = RecordingSink(self.dispatcher)
        self.links: list[ScriptedLink] = []
        self.wanted: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.num_lost = 0
        self._num_links = 0
        self._held: list[tuple[str, Step]] = []  # steps on their way from an engine

    def apply(self, operation: str, argument: int) -> None:
        if operation in _CLASSES:
            request_id = f"r{len(self.wanted)}"
            self.wanted[request_id] = argument
            of = _CLASSES[operation]
            request = in_flight(self.dispatcher, request_id, argument, service_class=of)
            self.dispatcher.submit(request)
        elif operation == "add_engine":
            self._num_links += 1
            engine_id = f"e{self._num_links}"
            # With 0 of a build that takes everything; the others say what they have room for.
            link = ScriptedLink(self.dispatcher, engine_id, places=argument or None)
            self.links.append(link)
        elif operation == "abort" and self.wanted:
            request_id = list(self.wanted)[argument % len(self.wanted)]
            self.dispatcher.abort([request_id])
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
            self.dispatcher.drain_engine(link.engine_id, "scaling down", 0.0)
        elif operation == "break_link":
            link.is_broken = True
        elif operation == "places":
            if link.tells_room:
                link.places = len(link.running) % 5
                link.tell()
        elif operation == "ask_back":
            if link.tells_room:  # what others wait for, and what they have themselves
                link.tell(to_yield=link.running[::2], num_batch_of_others=len(link.running) % 3)
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
            self.dispatcher.take_step(engine_id, step)

    def finish(self) -> None:
        """Lets everything that was left run to its end on healthy engines."""
        for link in list(self.links):
            if link.is_broken:
                self._apply_to_link("lose", link)
        self.apply("add_engine", 0)
        while self.dispatcher.num_in_flight:
            before = self.dispatcher.num_in_flight
            for link in self.links:
                for _ in range(31):
                    self._apply_to_link("step", link)
            assert self.dispatcher.num_in_flight < before, "nothing moves any more"
        for link in self.links:
            self._deliver_held(link)

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {request_id: [] for request_id in self.wanted} | self.sink.tokens


@settings(max_examples=300, deadline=None)
# Without an objective, with one that all are past at once, one that some are, and one that none is.
@given(st.lists(operations, max_size=60), st.sampled_from([None, 1e-9, 2e-4, 60.0]))
# A link that broke, of which more room is told than is known of it.
@example([("submit", 1), ("add_engine", 2), ("break_link", 0), ("submit", 1), ("places", 0)], None)
def test_every_token_comes_once_and_in_order_and_the_tables_end_empty(
    script: list[tuple[str, int]], ttft_s: float | None
) -> None:
    async def run() -> None:
        world = World(ttft_s)
        for operation, argument in script:
            world.apply(operation, argument)
        world.finish()
        for request_id, tokens in world.tokens.items():
            whole = answer_to(request_id, world.wanted[request_id])
            if request_id in world.aborted or request_id in world.sink.failures:
                assert tokens == whole[: len(tokens)]
            else:
                assert tokens == whole
        assert world.dispatcher.num_in_flight == 0
        assert world.dispatcher.num_waiting == 0
        assert all(not engine.requests for engine in world.dispatcher.connections)
        assert all(not link.running for link in world.links if not link.is_broken)
        # Nobody fails for less than the allowance of engines.
        assert all(isinstance(error, PoisonRequestError) for error in world.sink.failures.values())
        assert not world.sink.failures or world.num_lost >= MAX_LOSSES
        world.dispatcher.shutdown()

    asyncio.run(run())
