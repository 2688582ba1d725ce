"""Tenants that wait take turns by the work that each has had, and nobody saves up turns."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.usage.tenant_shares import TenantShares
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.link.messages import Step
from tests.gateway.engines import RecordingSink, ScriptedLink, in_flight


def turns(shares: TenantShares, weights: dict[str, float], num_turns: int) -> list[str]:
    """Who has turns, each of the same work, while all of them wait."""
    had = []
    for _ in range(num_turns):
        tenant = min(weights, key=shares.had)
        shares.has_turn(tenant, 1.0, weights[tenant])
        had.append(tenant)
    return had


def test_tenants_that_all_wait_have_turns_by_their_weights() -> None:
    weights = {"a": 5.0, "b": 3.0, "c": 2.0}
    had = turns(TenantShares(), weights, 100)
    assert {tenant: had.count(tenant) for tenant in weights} == {"a": 50, "b": 30, "c": 20}


def test_who_asked_for_nothing_has_saved_up_nothing() -> None:
    shares = TenantShares()
    turns(shares, {"a": 1.0}, 100)
    shares.begins_to_wait("late", ["a"])
    had = turns(shares, {"a": 1.0, "late": 1.0}, 20)
    assert had.count("late") == 10


def test_who_comes_back_when_nobody_waits_has_saved_up_nothing_either() -> None:
    shares = TenantShares()
    turns(shares, {"a": 1.0}, 100)
    shares.begins_to_wait("late", [])
    shares.begins_to_wait("a", ["late"])
    assert turns(shares, {"a": 1.0, "late": 1.0}, 20).count("late") in {10, 11}


def test_who_asks_for_less_than_a_share_is_next_whenever_it_comes() -> None:
    shares = TenantShares()
    for _ in range(20):
        shares.begins_to_wait("small", ["flood"])
        assert min(("small", "flood"), key=shares.had) == "small"
        shares.has_turn("small", 1.0, 1.0)
        for _ in range(3):
            shares.has_turn("flood", 1.0, 1.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 50)), max_size=200))
def test_tenants_that_wait_differ_by_one_request_at_most(work: list[tuple[str, float]]) -> None:
    shares = TenantShares()
    queued = {name: [each for tenant, each in work if tenant == name] for name in "abc"}
    largest = max((each for _, each in work), default=0.0)
    while all(queued.values()):
        tenant = min(queued, key=shares.had)
        shares.has_turn(tenant, queued[tenant].pop(), 1.0)
        had = [shares.had(name) for name in queued]
        assert max(had) - min(had) <= largest + 1e-6


# -- as the dispatcher takes turns --


async def test_who_is_told_to_leave_room_takes_none_of_the_last_places() -> None:
    dispatcher = Dispatcher("demo", FleetLimits())
    RecordingSink(dispatcher)
    link = ScriptedLink(dispatcher, places=16)
    for number in range(30):
        dispatcher.submit(in_flight(dispatcher, f"flood{number}", 1000, tenant="flood"))
    assert len(link.running) == 16, "no engine has told of others"
    dispatcher.abort([f"flood{number}" for number in range(4)])
    link.kept, link.leaving = 2, [(ServiceClass.STANDARD, "flood")]
    link.tell()
    assert len(link.running) == 14
    dispatcher.submit(in_flight(dispatcher, "few", 1000, tenant="few"))
    assert link.running[-1] == "few"
    link.leaving = []
    link.tell()
    assert len(link.running) == 16


async def test_what_an_engine_told_of_leaving_room_ends_with_it() -> None:
    dispatcher = Dispatcher("demo", FleetLimits())
    RecordingSink(dispatcher)
    first, second = (
        ScriptedLink(dispatcher, "e1", places=0),
        ScriptedLink(dispatcher, "e2", places=8),
    )
    first.leaving = [(ServiceClass.STANDARD, "")]
    first.tell()
    second.kept = 2
    second.tell()
    for number in range(9):
        dispatcher.submit(in_flight(dispatcher, f"r{number}", 1000))
    assert len(second.running) == 6
    first.end()
    second.tell()
    assert len(second.running) == 8


async def test_engines_hear_of_the_lines_whose_turns_come_first() -> None:
    dispatcher = Dispatcher("demo", FleetLimits())
    RecordingSink(dispatcher)
    link = ScriptedLink(dispatcher, places=2)
    lost = ScriptedLink(dispatcher, "e2", places=0)
    for tenant in ("a", "b"):
        dispatcher.submit(in_flight(dispatcher, f"{tenant}0", tenant=tenant, prompt=[1] * 100))
    for number in range(20):
        name = f"t{number}"
        dispatcher.submit(in_flight(dispatcher, name, tenant=name, prompt=[1] * 7, weight=2.0))
    chat = ServiceClass.INTERACTIVE
    for tenant, length in (("a", 40), ("a", 50), ("b", 60)):
        name = f"{tenant}{length}"
        request = in_flight(
            dispatcher, name, tenant=tenant, prompt=[1] * length, service_class=chat
        )
        dispatcher.submit(request)
    lost.tell()
    link.end(None)
    await asyncio.sleep(0.06)
    wanted = lost.wanted
    assert (wanted.num_requests, wanted.prefill_tokens) == (25, 200 + 20 * 7 + 150)
    assert [(each.service_class, each.num_requests, each.prefill_tokens) for each in wanted.lines][
        :4
    ] == [(-1, 2, 200), (0, 2, 90), (0, 1, 60), (1, 1, 7)]
    assert len(wanted.lines) == 16
    assert {each.weight for each in wanted.lines[3:]} == {2.0}


async def test_a_flood_of_one_tenant_does_not_stand_before_another() -> None:
    dispatcher = Dispatcher("demo", FleetLimits())
    RecordingSink(dispatcher)
    link = ScriptedLink(dispatcher, places=0)
    for number in range(50):
        dispatcher.submit(in_flight(dispatcher, f"flood{number}", tenant="flood", prompt=[1] * 50))
    for number in range(3):
        dispatcher.submit(in_flight(dispatcher, f"few{number}", tenant="few", prompt=[1] * 50))
    link.places = 6
    link.tell()
    assert link.running == ["flood0", "few0", "flood1", "few1", "flood2", "few2"]


async def test_a_tenant_is_charged_what_its_requests_took_in_the_end() -> None:
    """Of a long prompt all was cached: its tenant is next before one with a short prompt."""
    dispatcher = Dispatcher("demo", FleetLimits())
    RecordingSink(dispatcher)
    link = ScriptedLink(dispatcher, places=2)
    dispatcher.submit(in_flight(dispatcher, "long", 1, tenant="a", prompt=[1] * 900))
    dispatcher.submit(in_flight(dispatcher, "short", 1, tenant="b", prompt=[2] * 100))
    link.places = 0
    for tenant in ("a", "b"):
        for number in range(2):
            name = f"{tenant}{number}"
            dispatcher.submit(in_flight(dispatcher, name, tenant=tenant, prompt=[1] * 10))
    step = link.make_step()
    step.outputs[0].num_cached = 896
    dispatcher.take_step("e1", Step(step.outputs))
    link.places = 1
    link.tell()
    assert link.running == ["a0"]


async def test_a_move_is_not_charged_again() -> None:
    dispatcher = Dispatcher("demo", FleetLimits(max_engine_losses=9))
    RecordingSink(dispatcher)
    first, second = (
        ScriptedLink(dispatcher, "e1", places=2),
        ScriptedLink(dispatcher, "e2", places=0),
    )
    for tenant in ("a", "b"):
        dispatcher.submit(in_flight(dispatcher, tenant, tenant=tenant, prompt=[1] * 100))
    dispatcher.abort(["b"])
    for tenant in ("a", "b"):
        dispatcher.submit(in_flight(dispatcher, f"{tenant}-next", tenant=tenant, prompt=[1] * 99))
    first.end(None)
    second.places = 3
    second.tell()
    assert second.running == ["a~1", "a-next", "b-next"]


async def test_a_tenant_is_forgotten_where_it_waits_no_more() -> None:
    dispatcher = Dispatcher("demo", FleetLimits())
    RecordingSink(dispatcher)
    ScriptedLink(dispatcher, places=0)
    for number in range(5):
        dispatcher.submit(in_flight(dispatcher, f"r{number}", tenant=f"t{number}"))
    dispatcher.abort([f"r{number}" for number in range(5)])
    assert dispatcher.num_waiting == 0
    assert dispatcher.first_waiting_since_s(7.0) == 7.0
