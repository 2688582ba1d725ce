"""Batch work leaves engines for work that cannot wait, and loses nothing by it."""

from typing import Any

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from tests.gateway.engines import RecordingSink, ScriptedLink, answer_to, in_flight

INTERACTIVE, STANDARD, BATCH = ServiceClass


class Fleet:
    """A dispatcher and what it delivers."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits())
        self.sink = RecordingSink(self.dispatcher)

    def engine(self, engine_id: str = "e1", places: int = 2) -> ScriptedLink:
        return ScriptedLink(self.dispatcher, engine_id, places=places)

    def submit(self, *names: str, of: ServiceClass = BATCH, **changes: Any) -> None:
        for name in names:
            request = in_flight(self.dispatcher, name, service_class=of, **changes)
            self.dispatcher.submit(request)


async def test_the_newest_leaves_and_goes_on_where_it_stood() -> None:
    fleet = Fleet()
    link = fleet.engine(places=2)
    fleet.submit("old", "new")
    link.step(2)
    fleet.submit("chat", of=INTERACTIVE)
    assert link.aborted == ["new"]
    assert link.running == ["old"]
    link.tell()
    assert link.running == ["old", "chat"]
    link.step(9)
    assert fleet.sink.tokens == {name: answer_to(name) for name in ("old", "new", "chat")}
    assert link.submitted[-1].request_id == "new~1"
    assert len(link.submitted[-1].emitted_token_ids) == 2


async def test_it_goes_to_another_engine_that_has_room() -> None:
    fleet = Fleet()
    full = fleet.engine("e1", places=1)
    fleet.submit("batch")
    fleet.submit("chat", of=STANDARD)
    assert full.aborted == ["batch"]
    other = fleet.engine("e2", places=1)
    assert other.running == ["chat"], "what cannot wait goes first"
    full.tell()
    assert full.running == ["batch~1"]


async def test_what_moves_together_does_not_make_way_for_each_other() -> None:
    fleet = Fleet()
    ScriptedLink(fleet.dispatcher, "e1")
    fleet.submit("chat", of=STANDARD)
    fleet.submit("batch")
    fleet.dispatcher.drain_engine("e1", "the test says so", 0.0)
    # It has told of no room yet when they leave the first one, the chat before the batch work.
    other = fleet.engine("e2", places=1)
    assert (other.running, other.aborted) == (["chat~1"], [])
    assert fleet.dispatcher.num_waiting == 1


async def test_none_leaves_an_engine_that_drains() -> None:
    fleet = Fleet()
    link = fleet.engine("e1", places=4)
    fleet.submit("batch")
    fleet.dispatcher.drain_engine("e1", "the test says so", None)
    fleet.engine("e2", places=0)
    fleet.submit("chat", of=INTERACTIVE)
    assert (link.running, link.aborted) == (["batch"], [])


async def test_no_more_leave_than_have_no_room() -> None:
    fleet = Fleet()
    links = [fleet.engine(f"e{number}", places=2) for number in range(3)]
    fleet.submit(*(f"b{number}" for number in range(6)))
    fleet.submit("chat", of=INTERACTIVE)
    assert sum(len(link.aborted) for link in links) == 1
    fleet.submit("chat2", of=INTERACTIVE)
    assert sum(len(link.aborted) for link in links) == 2


async def test_an_engine_tells_of_its_room_before_more_leave_it() -> None:
    fleet = Fleet()
    link = fleet.engine(places=3)
    fleet.submit("a", "b", "c")
    fleet.submit("x", "y", of=INTERACTIVE)
    assert link.aborted == ["c"]
    link.tell()
    assert link.running == ["a", "x"]
    assert link.aborted == ["c", "b"]
    link.tell()
    assert link.running == ["a", "x", "y"]


async def test_batch_work_does_not_leave_for_batch_work_nor_what_has_room() -> None:
    fleet = Fleet()
    link = fleet.engine(places=2)
    fleet.submit("a", "b", "c", "d")
    assert not link.aborted
    fleet.dispatcher.abort(["b"])
    link.tell()
    fleet.submit("chat", of=INTERACTIVE)
    assert link.aborted == ["b", "c"], "one was gone already, and another came in its place"


async def test_one_that_has_left_often_stays() -> None:
    fleet = Fleet()
    link = fleet.engine(places=1)
    fleet.submit("batch", max_tokens=100)
    for number in range(5):
        fleet.submit(f"chat{number}", of=INTERACTIVE, max_tokens=1)
        link.tell()
        link.step()
    assert [name.partition("~")[0] for name in link.aborted] == ["batch"] * 3
    assert link.running == ["batch~3"]


async def test_one_that_cannot_be_resumed_stays() -> None:
    fleet = Fleet()
    link = fleet.engine(places=1)
    fleet.submit("embeds", is_resumable=False)
    link.step()
    fleet.submit("chat", of=INTERACTIVE)
    assert not link.aborted


async def test_a_class_below_goes_on_only_behind_those_above() -> None:
    fleet = Fleet()
    link = fleet.engine(places=1)
    fleet.submit("batch")
    fleet.submit("chat", of=INTERACTIVE, max_tokens=1)
    fleet.submit("usual", of=STANDARD, max_tokens=1)
    link.tell()
    assert link.running == ["chat"]
    link.step()
    assert link.running == ["usual"]
    link.step()
    assert link.running == ["batch~1"]


async def test_batch_work_leaves_some_room_while_other_work_comes() -> None:
    fleet = Fleet()
    link = fleet.engine(places=16)
    link.kept, link.is_batch_leaving = 2, True
    link.tell()
    fleet.submit(*(f"b{number}" for number in range(30)), max_tokens=1000)
    assert len(link.running) == 14
    fleet.submit("chat", of=INTERACTIVE, max_tokens=1000)
    assert link.running[-1] == "chat"
    assert not link.aborted
    link.is_batch_leaving = False
    link.tell()
    assert len(link.running) == 16


async def test_a_place_of_other_gateways_batch_work_is_asked_for_once() -> None:
    fleet = Fleet()
    links = [fleet.engine(f"e{number}", places=0) for number in range(3)]
    for number, link in enumerate(links):
        link.tell(num_batch_of_others=number)
    fleet.submit("chat", of=INTERACTIVE)
    assert [link.num_ways_asked for link in links] == [0, 0, 1], "where most of it is"
    links[2].tell(num_batch_of_others=1)
    links[1].tell(num_batch_of_others=1)
    assert [link.num_ways_asked for link in links] == [0, 0, 1], "it has not left yet"
    links[2].tell(num_batch_of_others=1, num_ways_over=1)
    assert [link.num_ways_asked for link in links] == [0, 0, 2], "others had the place"
    fleet.submit("usual", of=STANDARD)
    assert [link.num_ways_asked for link in links] == [0, 1, 2]


async def test_own_batch_work_leaves_first() -> None:
    fleet = Fleet()
    own, other = fleet.engine("e1", places=1), fleet.engine("e2", places=0)
    fleet.submit("batch")
    other.tell(num_batch_of_others=5)
    fleet.submit("chat", of=INTERACTIVE)
    assert (own.aborted, other.num_ways_asked) == (["batch"], 0)
    fleet.submit("chat2", of=INTERACTIVE)
    assert (own.aborted, other.num_ways_asked) == (["batch"], 1)


async def test_batch_work_asks_for_nobodys_place() -> None:
    fleet = Fleet()
    link = fleet.engine(places=0)
    link.tell(num_batch_of_others=3)
    fleet.submit("batch")
    assert link.num_ways_asked == 0


async def test_what_is_asked_back_leaves_and_goes_on_where_it_stood() -> None:
    fleet = Fleet()
    link = fleet.engine(places=2)
    fleet.submit("old", "new")
    link.step(2)
    link.tell(to_yield=["new", "of no gateway any more"])
    assert (link.running, link.aborted) == (["old"], ["new"])
    assert fleet.dispatcher.num_waiting == 1
    link.tell()
    assert link.running == ["old", "new~1"]
    link.step(9)
    assert fleet.sink.tokens == {name: answer_to(name) for name in ("old", "new")}


async def test_what_cannot_leave_stays_though_it_is_asked_back() -> None:
    fleet = Fleet()
    link = fleet.engine(places=1)
    fleet.submit("embeds", is_resumable=False)
    link.step()
    link.tell(to_yield=["embeds"])
    assert not link.aborted
