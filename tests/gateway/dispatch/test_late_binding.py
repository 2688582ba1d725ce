"""A request goes to an engine when that has room for it, and waits at the gateway until then."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from serving.domain.errors import NoEngineInTimeError, NoRoomInTimeError
from serving.domain.limits import FLEX_DEADLINE_S
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.tokens.block_hashes import first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, joined
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.dispatch.load import load_of
from serving.link.messages import CacheDelta, CacheSnapshot, EngineEnd
from tests.engine.simulated_time import run_simulated
from tests.gateway.engines import RecordingSink, ScriptedLink, answer_to, in_flight

DEADLINE_S = 60.0


class Fleet:
    """A dispatcher and what it delivers."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=DEADLINE_S))
        self.sink = RecordingSink(self.dispatcher)

    def engine(self, engine_id: str = "e1", places: int = 2) -> ScriptedLink:
        return ScriptedLink(self.dispatcher, engine_id, places=places)

    def submit(self, *request_ids: str, **changes: Any) -> None:
        for request_id in request_ids:
            self.dispatcher.submit(in_flight(self.dispatcher, request_id, **changes))

    @property
    def because(self) -> dict[str, int]:
        """How often what has decided."""
        return dict(self.dispatcher.telemetry.metrics.of_class("local").dispatches)

    def know_lengths(self, link: ScriptedLink) -> None:
        """Has an answer end, and the load looked at, as reports do once a second."""
        self.submit("known", max_tokens=1)
        link.step()
        load_of([self.dispatcher], self.dispatcher.queue, asyncio.get_running_loop().time())


def simulated(main: Coroutine[Any, Any, None]) -> None:
    run_simulated(main)


async def test_a_request_waits_until_an_engine_has_room() -> None:
    fleet = Fleet()
    link = fleet.engine(places=2)
    fleet.submit("a", "b", "c", "d", max_tokens=1)
    assert link.running == ["a", "b"]
    assert fleet.dispatcher.num_waiting == 2
    link.step()
    assert link.running == ["c", "d"]
    link.step()
    assert fleet.sink.tokens == {each: answer_to(each, 1) for each in "abcd"}
    assert fleet.dispatcher.num_waiting == 0


async def test_an_engine_that_has_told_nothing_gets_nothing() -> None:
    fleet = Fleet()
    link = fleet.engine(places=0)
    fleet.submit("a")
    assert link.running == []
    link.tell(num_requests=1)
    assert link.running == ["a"]


@pytest.mark.parametrize("places", [3, None])
async def test_a_link_that_broke_gets_no_more_until_its_loss_is_told(places: int | None) -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher, "e1", places=places)
    fleet.submit("first")
    link.is_broken = True
    fleet.submit("second", "third", "fourth")
    assert fleet.dispatcher.num_waiting == 2
    fleet.submit("chat", service_class=ServiceClass.INTERACTIVE)
    fleet.dispatcher.lose_engine("e1", "its host went")
    other = fleet.engine("e2", places=3)
    # Those that were given to it have lost an engine; those behind them keep their places in line.
    assert [each.split("#")[0] for each in other.running[2:]] == ["chat"]
    assert len(other.running) == 3
    moved = [other.submitted[at].request_id != name for at, name in enumerate(("first", "second"))]
    assert moved == [True, True]


async def test_a_link_that_broke_gets_no_more_by_what_its_host_has_told_before() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher, "e1", places=3)
    link.is_broken = True
    fleet.submit("first", "second")
    # Written before the link broke, and read after.
    link.tell(num_taken=1, num_requests=3)
    assert fleet.dispatcher.num_waiting == 1
    fleet.dispatcher.lose_engine("e1", "its host went")
    other = fleet.engine("e2", places=3)
    assert len(other.running) == 2


async def test_who_came_first_goes_first() -> None:
    fleet = Fleet()
    link = fleet.engine(places=1)
    fleet.submit("a", "b", "c", max_tokens=1)
    link.tell(num_requests=0)
    fleet.submit("d", max_tokens=1)
    for _ in range(4):
        link.step()
    assert [request.request_id for request in link.submitted] == ["a", "b", "c", "d"]


async def test_a_new_engine_gets_its_share_of_what_waits_at_once() -> None:
    fleet = Fleet()
    fleet.engine("e1", places=2)
    fleet.submit(*(f"r{number}" for number in range(12)))
    new = fleet.engine("e2", places=8)
    assert new.running == [f"r{number}" for number in range(2, 10)]
    assert fleet.dispatcher.num_waiting == 2


async def test_a_stream_that_lost_its_engine_goes_before_those_that_have_not_begun() -> None:
    fleet = Fleet()
    first, second = fleet.engine("e1", places=1), fleet.engine("e2", places=1)
    fleet.submit("a", "b", "new")
    first.step()
    first.end()
    assert fleet.dispatcher.num_waiting == 2
    second.step(5)
    assert second.running == ["a~1"]
    second.step(4)
    assert second.running == ["new"]
    assert fleet.sink.tokens["a"] == answer_to("a")


async def test_the_engine_with_the_shortest_line_of_prompts_is_chosen() -> None:
    fleet = Fleet()
    long, short = fleet.engine("e1", places=9), fleet.engine("e2", places=9)
    long.tell(backlog_tokens=9000)
    short.tell(backlog_tokens=300, num_sequences=5)
    fleet.submit("a")
    assert short.running == ["a"]


async def test_of_engines_that_are_as_soon_the_one_with_the_fewest_requests_is_chosen() -> None:
    fleet = Fleet()
    busy, idle = fleet.engine("e1", places=9), fleet.engine("e2", places=9)
    busy.tell(backlog_tokens=0, num_sequences=5)
    idle.tell(backlog_tokens=30, num_sequences=1)
    fleet.submit("a")
    assert idle.running == ["a"]


async def test_what_other_gateways_have_there_counts() -> None:
    fleet = Fleet()
    others, free = fleet.engine("e1", places=9), fleet.engine("e2", places=9)
    fleet.submit("mine")
    assert others.running == ["mine"]
    others.tell(num_sequences=1)
    free.tell(num_sequences=7)
    fleet.submit("a")
    assert others.running == ["mine", "a"]


async def test_one_that_needs_much_of_the_cache_does_not_keep_others_from_it() -> None:
    fleet = Fleet()
    link = fleet.engine(places=9)
    link.tell(kv_tokens=50, num_sequences=1)
    fleet.submit("large", prompt=[1] * 100)
    fleet.submit("small", prompt=[1] * 10)
    assert link.running == ["small"]
    assert fleet.dispatcher.num_waiting == 1
    link.tell(kv_tokens=500, num_sequences=1)
    assert link.running == ["small", "large"]


async def test_no_more_than_a_few_overtake_one_that_needs_much() -> None:
    """Else one would never get its turn while small ones come."""
    fleet = Fleet()
    link = fleet.engine(places=99)
    link.tell(kv_tokens=50, num_sequences=1)
    fleet.submit(*(f"large{number}" for number in range(16)), prompt=[1] * 100)
    fleet.submit("small", prompt=[1] * 10)
    assert link.running == []


async def test_a_request_that_waits_can_be_aborted() -> None:
    fleet = Fleet()
    link = fleet.engine(places=1)
    fleet.submit("a", "b", "c", max_tokens=1)
    fleet.dispatcher.abort(["b"])
    assert fleet.dispatcher.num_waiting == 1
    link.step()
    assert link.running == ["c"]


async def test_requests_stay_on_a_draining_engine_while_no_other_has_room() -> None:
    fleet = Fleet()
    old, other = fleet.engine("e1", places=3), fleet.engine("e2", places=0)
    fleet.submit("a", "b", "c", max_tokens=1000)
    fleet.dispatcher.drain_engine("e1", "scaled down", 8.0)
    assert old.running == ["a", "b", "c"]
    other.places = 2
    other.tell()
    assert other.running == ["a~1", "b~1"]
    assert old.running == ["c"]
    assert fleet.dispatcher.num_waiting == 0


def test_requests_leave_a_draining_engine_before_its_end_room_or_not() -> None:
    async def main() -> None:
        fleet = Fleet()
        old, other = fleet.engine("e1", places=2), fleet.engine("e2", places=0)
        fleet.submit("a", max_tokens=1000)
        fleet.dispatcher.drain_engine("e1", "scaled down", 8.0)
        await asyncio.sleep(8.0)
        assert old.running == []
        other.places = 1
        other.tell()
        assert other.running == ["a~1"]

    simulated(main())


def test_who_waits_for_room_is_refused_when_its_first_token_is_due() -> None:
    async def main() -> None:
        fleet = Fleet()
        link = fleet.engine(places=1)
        fleet.submit("a", "b", max_tokens=1)
        fleet.submit("urgent", max_tokens=1, patience_s=2.0)
        fleet.submit("whenever", max_tokens=1, service_class=ServiceClass.BATCH)
        await asyncio.sleep(1.9)
        assert not fleet.sink.failures
        await asyncio.sleep(0.2)
        assert fleet.sink.failures.keys() == {"urgent"}
        await asyncio.sleep(DEADLINE_S)
        assert fleet.sink.failures.keys() == {"urgent", "b"}
        for refusal in fleet.sink.failures.values():
            assert isinstance(refusal, NoRoomInTimeError)
            assert (refusal.retry_after_s or 0.0) >= 1.0
        assert "2.0 s" in fleet.sink.failures["urgent"].message
        link.step()
        assert link.running == ["whenever"]
        await asyncio.sleep(2 * FLEX_DEADLINE_S)
        assert len(fleet.sink.failures) == 2, "an engine has it"

    simulated(main())


def test_a_stream_that_has_begun_waits_for_room_as_long_as_an_engine_is_ready() -> None:
    async def main() -> None:
        fleet = Fleet()
        first, second = fleet.engine("e1", places=1), fleet.engine("e2", places=0)
        fleet.submit("a")
        first.step()
        first.end()
        await asyncio.sleep(10 * DEADLINE_S)
        assert not fleet.sink.failures
        second.places = 1
        second.tell()
        assert second.running == ["a~1"]

    simulated(main())


def test_a_deadline_is_kept_over_engines_that_were_lost_before_the_first_token() -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.submit("a")
        for number in range(3):
            await asyncio.sleep(DEADLINE_S / 4)
            fleet.engine(f"e{number}", places=1).end(EngineEnd.TOLD)
        await asyncio.sleep(DEADLINE_S / 4 + 1)
        assert isinstance(fleet.sink.failures["a"], NoEngineInTimeError)

    simulated(main())


@pytest.mark.parametrize("drains", [True, False])
def test_without_an_engine_a_stream_that_has_begun_waits_from_when_the_last_one_went(
    drains: bool,
) -> None:
    async def main() -> None:
        fleet = Fleet()
        first, last = fleet.engine("e1", places=1), fleet.engine("e2", places=0)
        fleet.submit("a")
        first.step()
        first.end()
        await asyncio.sleep(10 * DEADLINE_S)
        if drains:
            fleet.dispatcher.drain_engine("e2", "scaled down", None)
        else:
            last.end()
        await asyncio.sleep(DEADLINE_S - 1)
        assert not fleet.sink.failures
        await asyncio.sleep(2)
        assert isinstance(fleet.sink.failures["a"], NoEngineInTimeError)
        assert fleet.dispatcher.num_waiting == 0

    simulated(main())


def test_engines_hear_at_once_that_something_waits_and_then_at_times_how_much() -> None:
    async def main() -> None:
        fleet = Fleet()
        links = [fleet.engine("e1", places=0), fleet.engine("e2", places=0)]
        for number in range(200):
            fleet.submit(f"r{number}", prompt=[1] * 10)
        assert [link.demands for link in links] == [[(1, 10)], [(1, 10)]]
        await asyncio.sleep(1.0)
        assert links[0].demands == [(1, 10), (200, 2000)]
        fleet.dispatcher.abort([f"r{number}" for number in range(200)])
        assert links[0].demands[-1] == (0, 0)

    simulated(main())


async def test_a_new_engine_hears_what_waits() -> None:
    fleet = Fleet()
    fleet.submit("a", prompt=[1] * 10)
    assert fleet.engine(places=0).demands == [(1, 10)]


async def test_an_engine_of_an_earlier_build_gets_everything_and_hears_nothing() -> None:
    fleet = Fleet()
    full = fleet.engine("e1", places=0)
    fleet.submit("a")
    old = ScriptedLink(fleet.dispatcher, "e2")
    assert (old.running, old.demands) == (["a"], [])
    assert full.demands[-1] == (0, 0)


# -- what engines have in their caches --

LAYOUT = CacheLayout.of_blocks(16, first_parent())
PROMPT = list(range(1000))


def keys_of(tokens: list[int]) -> bytes:
    return joined(NamedBlocks(tokens).keys(LAYOUT))


def with_cache(
    fleet: Fleet, engine_id: str, tokens: list[int], places: int | None = 9
) -> ScriptedLink:
    link = ScriptedLink(fleet.dispatcher, engine_id, places=places, cache_layout=LAYOUT)
    link.on_cache(CacheSnapshot(keys_of(tokens), is_first=True))
    return link


async def test_a_request_goes_where_most_of_it_is_cached() -> None:
    fleet = Fleet()
    with_cache(fleet, "e1", [])
    some, most = with_cache(fleet, "e2", PROMPT[:400]), with_cache(fleet, "e3", PROMPT[:900])
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert most.running == ["a"]
    most.step()
    most.on_cache(CacheDelta(b"", keys_of(PROMPT[:900])))
    fleet.submit("b", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert some.running == ["b"]


async def test_blocks_are_named_as_far_as_an_engine_has_them_and_counted() -> None:
    fleet = Fleet()
    numbers = fleet.dispatcher.telemetry.metrics.of_class("local")
    link = with_cache(fleet, "e1", PROMPT[:400])
    # Of 1,000 tokens 384 are known, in units of 128 that have eight blocks each; and all that
    # the engine will have are named for it, 62 blocks that are full.
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert numbers.named_blocks == 62
    link.step()
    fleet.dispatcher.abort(["a"])
    fleet.submit("b", prompt=[7] * 20)  # what engines call its blocks is not known
    assert numbers.named_blocks == 62
    # One that moves is named anew, with what it has emitted.
    fleet.submit("c", prompt=PROMPT[:200], blocks=NamedBlocks(PROMPT[:200]), max_tokens=90)
    assert numbers.named_blocks == 62 + 12
    link.step(60)
    with_cache(fleet, "e2", [])
    link.end()
    assert numbers.named_blocks == 62 + 12 + 16


async def test_a_longer_line_outweighs_what_is_cached() -> None:
    """A hot beginning spreads when its engine has three times in line what it would save."""
    fleet = Fleet()
    idle, hot = with_cache(fleet, "e1", []), with_cache(fleet, "e2", PROMPT)
    hot.tell(backlog_tokens=2 * len(PROMPT))
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert hot.running == ["a"]
    assert fleet.because == {"cached": 1}
    hot.tell(backlog_tokens=3 * len(PROMPT) + 500)
    fleet.submit("b", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert idle.running == ["b"]
    assert fleet.because == {"cached": 1, "least_to_do": 1}


async def test_an_engine_that_is_full_does_not_get_it_for_its_cache() -> None:
    fleet = Fleet()
    other, full = with_cache(fleet, "e1", []), with_cache(fleet, "e2", PROMPT, places=0)
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert (other.running, full.running) == (["a"], [])


async def test_a_popular_beginning_comes_elsewhere_but_by_no_stream_that_lost_its_engine() -> None:
    fleet = Fleet()
    first = with_cache(fleet, "e1", PROMPT)
    for number in range(70):
        fleet.submit(f"r{number}", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
        first.step(1)
        if number < 69:
            fleet.dispatcher.abort([f"r{number}"])
    has_it, idle = with_cache(fleet, "e2", PROMPT), with_cache(fleet, "e3", [])
    has_it.tell(num_sequences=5)
    first.end()
    assert (has_it.running, idle.running) == (["r69~1"], [])
    fleet.submit("new", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert idle.running == ["new"]
    assert fleet.because == {"only_one": 70, "cached": 1, "spread": 1}


async def test_a_stream_that_lost_its_engine_goes_where_its_beginning_is() -> None:
    """What it has emitted counts with its prompt."""
    fleet = Fleet()
    first = with_cache(fleet, "e1", PROMPT)
    fleet.submit("a", prompt=PROMPT[:120], blocks=NamedBlocks(PROMPT[:120]), max_tokens=50)
    first.step(16)
    whole = PROMPT[:120] + fleet.sink.tokens["a"]
    with_cache(fleet, "e2", [])
    has_it = with_cache(fleet, "e3", whole)
    with_cache(fleet, "e4", [])
    first.end()
    assert has_it.running == ["a~1"]


async def test_cached_tokens_take_no_room() -> None:
    fleet = Fleet()
    link = with_cache(fleet, "e1", PROMPT)
    link.tell(num_requests=3, prefill_tokens=500)
    for name in ("a", "b"):
        fleet.submit(name, prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert link.running == ["a", "b"]
    fleet.submit("c", prompt=[7] * 600, blocks=NamedBlocks([7] * 600))
    fleet.submit("d", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert link.running == ["a", "b", "c"]


async def test_an_engine_that_was_lost_has_nothing_cached_when_it_comes_back() -> None:
    fleet = Fleet()
    with_cache(fleet, "e1", PROMPT).end()
    fresh = ScriptedLink(fleet.dispatcher, "e1", places=9, cache_layout=LAYOUT)
    has_some = with_cache(fleet, "e2", PROMPT[:500])
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert (fresh.running, has_some.running) == ([], ["a"])


async def test_requests_that_begin_alike_and_come_together_meet_on_one_engine() -> None:
    fleet = Fleet()
    links = [with_cache(fleet, f"e{number}", []) for number in range(4)]
    for number in range(3):
        own = [*PROMPT[:800], *([number] * 100)]
        fleet.submit(f"r{number}", prompt=own, blocks=NamedBlocks(own))
    assert sorted(len(link.running) for link in links) == [0, 0, 0, 3]
    fleet.dispatcher.abort(["r0", "r1", "r2"])
    fleet.submit("later", prompt=PROMPT[:800], blocks=NamedBlocks(PROMPT[:800]))
    assert [len(link.submitted) for link in links] == [3, 1, 0, 0]


async def test_a_request_waits_for_the_engine_that_has_it_if_that_takes_less() -> None:
    fleet = Fleet()
    other, has_it = with_cache(fleet, "e1", []), with_cache(fleet, "e2", PROMPT)
    other.tell(backlog_tokens=5000)
    has_it.tell(num_requests=0, prefill_tokens=0, backlog_tokens=5500)
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert (other.running, has_it.running) == ([], [])
    fleet.submit("unlike", prompt=[7] * 500, blocks=NamedBlocks([7] * 500))
    assert other.running == ["unlike"], "it does not keep others from an engine that is open"
    has_it.tell(backlog_tokens=100)
    assert has_it.running == ["a"]
    assert fleet.because == {"waited": 1, "only_one": 1}


async def test_who_has_waited_for_one_engine_and_got_another_did_not_wait_for_that() -> None:
    fleet = Fleet()
    other, has_it = with_cache(fleet, "e1", []), with_cache(fleet, "e2", PROMPT)
    other.tell(backlog_tokens=5000)
    has_it.tell(num_requests=0, prefill_tokens=0, backlog_tokens=5500)
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    other.tell(backlog_tokens=100)
    assert other.running == ["a"]
    assert fleet.because == {"only_one": 1}


async def test_it_does_not_wait_where_the_line_is_longer_than_what_it_would_save() -> None:
    fleet = Fleet()
    other, has_it = with_cache(fleet, "e1", []), with_cache(fleet, "e2", PROMPT)
    has_it.tell(num_requests=0, prefill_tokens=0, backlog_tokens=9000)
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert (other.running, has_it.running) == (["a"], [])


async def test_it_does_not_wait_for_an_engine_without_a_free_place() -> None:
    fleet = Fleet()
    other, has_it = with_cache(fleet, "e1", []), with_cache(fleet, "e2", PROMPT, places=0)
    has_it.tell(backlog_tokens=0)
    fleet.submit("a", prompt=PROMPT, blocks=NamedBlocks(PROMPT))
    assert (other.running, has_it.running) == (["a"], [])


# -- who is refused, when little is known of what engines do --


async def at(seconds: float) -> None:
    """Waits for a time of the simulation."""
    await asyncio.sleep(seconds - asyncio.get_running_loop().time())


def test_what_is_taken_after_an_outage_is_no_rate() -> None:
    """Answers of 20 s begin together when the engine is back: for so long nothing can be taken."""

    async def main() -> None:
        fleet = Fleet()
        first = fleet.engine("e1", places=4)
        fleet.know_lengths(first)
        first.end()
        fleet.submit(*(f"r{number}" for number in range(8)), max_tokens=2)
        await at(10.0)
        engine = fleet.engine("e2", places=4)
        engine.step()
        assert len(engine.running) == 4
        for number in range(20):
            await at(11.0 + number)
            fleet.submit(f"n{number}", max_tokens=2)
        assert fleet.sink.failures == {}

    simulated(main())


def test_first_answers_that_end_after_a_long_silence_are_no_rate() -> None:
    """Thirty-two answers begin together, take 20 s each, and end within a second.

    The line behind them is as long: all of it is taken by then. Who comes when the first few have
    ended waits for no more than the next turn, and has the time for it.
    """

    async def main() -> None:
        fleet = Fleet()
        engine = fleet.engine(places=32)
        fleet.know_lengths(engine)
        fleet.submit(*(f"a{number}" for number in range(64)), max_tokens=2)
        engine.step()
        await at(20.0)
        for number in range(32):
            await at(20.0 + number / 32)
            engine.step(only=[f"a{number}"])
            fleet.submit(f"n{number}", max_tokens=2)
        assert fleet.sink.failures == {}
        assert fleet.dispatcher.num_waiting == 32

    simulated(main())


def test_what_was_forgotten_of_an_overload_long_ago_is_no_rate() -> None:
    async def main() -> None:
        fleet = Fleet()
        engine = fleet.engine(places=4)
        fleet.know_lengths(engine)
        fleet.submit(*(f"old{number}" for number in range(100)), max_tokens=1)
        for second in range(26):
            await at(second)
            engine.step()
        assert fleet.dispatcher.num_in_flight == 0
        await at(600.0)
        fleet.submit(*(f"a{number}" for number in range(8)), max_tokens=2)
        for number in range(20):
            await at(601.0 + number)
            fleet.submit(f"n{number}", max_tokens=2)
        assert fleet.sink.failures == {}

    simulated(main())


def test_a_line_that_engines_are_known_to_be_too_slow_for_is_refused() -> None:
    async def main() -> None:
        fleet = Fleet()
        engine = fleet.engine(places=4)
        fleet.know_lengths(engine)
        fleet.submit(*(f"r{number}" for number in range(100)), max_tokens=1)
        for second in range(10):
            await at(second)
            engine.step()
        # Four in a second: those that are left are no reason, ten times as many are.
        fleet.submit("in time", max_tokens=1)
        assert fleet.sink.failures == {}
        fleet.submit(*(f"more{number}" for number in range(300)), max_tokens=1)
        assert len(fleet.sink.failures) > 100

    simulated(main())
