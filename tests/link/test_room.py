"""What an engine has room for is dealt out by need, told when it matters, and never twice."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.domain.capacity.step_places import StepSums
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.link.messages import EngineLoad, EngineStats, RoomWanted, WaitingLine
from serving.link.rooms.dealing import DealingOrder, deal
from serving.link.rooms.gateway_rooms import GatewayRooms
from serving.link.rooms.room import EngineCapacity, FreeRoom, free_room
from serving.link.rooms.step_watch import StepWatch
from serving.link.rooms.turns import ChargedRequest

CAPACITY = EngineCapacity(max_num_seqs=8, max_num_batched_tokens=1000, num_kv_tokens=10_000)
NOTHING = RoomWanted()


def test_prompts_in_line_and_used_cache_take_room() -> None:
    load = EngineLoad(3, 1, kv_usage_ratio=0.5, backlog_tokens=600)
    assert free_room(CAPACITY, load, 4) == FreeRoom(4, 400, 4500 - 600, 4)


def test_an_engine_without_requests_has_all_of_its_cache() -> None:
    assert free_room(CAPACITY, EngineLoad(kv_usage_ratio=0.9), 0).kv_tokens == 10_000


def test_an_engine_without_a_known_cache_has_no_bound_there() -> None:
    capacity = EngineCapacity(8, 1000)
    assert free_room(capacity, EngineLoad(kv_usage_ratio=0.99), 3).kv_tokens is None


def test_who_has_most_waiting_gets_no_more_than_its_turns() -> None:
    shares = deal(
        FreeRoom(6, 100_000, None), {"a": RoomWanted(1000, 10_000), "b": RoomWanted(2, 20)}
    )
    assert (shares["a"].sequences, shares["b"].sequences) == (4, 2)


def test_what_nobody_asks_for_is_everybodys() -> None:
    shares = deal(FreeRoom(8, 1000, None), {"a": NOTHING, "b": NOTHING})
    assert [share.sequences for share in shares.values()] == [4, 4]


def test_places_end_with_the_prompt_tokens() -> None:
    """Each takes 600 of 1,000: the second takes more than are left, the third has to wait."""
    shares = deal(FreeRoom(6, 1000, None), {"a": RoomWanted(5, 3000)})
    assert shares["a"].sequences == 2


def test_prompts_that_are_mostly_cached_take_less() -> None:
    shares = deal(FreeRoom(6, 1000, None), {"a": RoomWanted(9, 5400)}, computed_ratio=0.1)
    assert shares["a"].sequences == 6


def winner(demands: dict[str, RoomWanted], turn: int, **order: Any) -> str:
    """Who gets the one place that is left."""
    shares = deal(FreeRoom(1, 1000, None), demands, order=DealingOrder(first=turn, **order))
    (name,) = [name for name, share in shares.items() if share.sequences]
    return name


def test_the_last_place_goes_to_each_in_turn() -> None:
    demands = {name: RoomWanted(5, 5) for name in "abc"}
    assert [winner(demands, turn) for turn in range(6)] == ["a", "b", "c"] * 2


def test_who_stands_behind_idle_gateways_has_no_more_turns() -> None:
    demands = {"a": RoomWanted(5, 5), "idle": NOTHING, "idle too": NOTHING, "b": RoomWanted(5, 5)}
    assert [winner(demands, turn) for turn in range(6)] == ["a", "b"] * 3


# -- lines of tenants --


def line(
    tenant: str, count: int, of: ServiceClass = ServiceClass.STANDARD, weight: float = 1.0
) -> WaitingLine:
    """So many requests of ten tokens, each of the work of as many."""
    return WaitingLine(int(of), tenant, weight, count, 10 * count, 10.0 * count)


def wanted(*lines: WaitingLine, rest: int = 0) -> RoomWanted:
    count = sum(each.num_requests for each in lines) + rest
    return RoomWanted(count, 10 * count, list(lines))


def dealt(demands: dict[str, RoomWanted], sequences: int, **order: Any) -> dict[str, int]:
    free = FreeRoom(sequences, 10**6, None)
    shares = deal(free, demands, order=DealingOrder(**order))
    return {name: share.sequences for name, share in shares.items()}


def test_a_flood_at_one_gateway_has_no_more_than_a_few_at_another() -> None:
    demands = {"a": wanted(line("flood", 1000)), "b": wanted(line("few", 3), line("fewer", 1))}
    assert dealt(demands, 12) == {"a": 8, "b": 4}


def test_a_tenant_has_no_more_by_waiting_at_many_gateways() -> None:
    demands = {name: wanted(line("flood", 1000)) for name in "abc"} | {"d": wanted(line("one", 50))}
    assert dealt(demands, 30) == {"a": 5, "b": 5, "c": 5, "d": 15}


def test_places_are_dealt_by_weight_and_by_what_each_has_had() -> None:
    demands = {"a": wanted(line("heavy", 99, weight=3.0)), "b": wanted(line("light", 99))}
    assert dealt(demands, 12) == {"a": 9, "b": 3}
    had = {"heavy": 40.0, "light": 0.0}
    assert dealt(demands, 4, had=lambda account: had[account[1]]) == {"a": 0, "b": 4}


def test_a_class_has_its_turn_when_nothing_above_waits() -> None:
    chat, batch = line("t", 3, ServiceClass.INTERACTIVE), line("t", 9, ServiceClass.BATCH)
    assert dealt({"a": wanted(batch), "b": wanted(chat)}, 8) == {"a": 5, "b": 3}


def test_what_has_moved_is_first() -> None:
    moved = WaitingLine(-1, "", 1.0, 2, 20, 0.0)
    chat = line("t", 9, ServiceClass.INTERACTIVE)
    assert dealt({"a": wanted(chat), "b": wanted(moved)}, 3) == {"a": 1, "b": 2}


def test_what_has_moved_may_have_places_that_an_objective_closes_to_others() -> None:
    chat = line("t", 9, ServiceClass.INTERACTIVE)

    def given(num_places: int, num_moved: int) -> tuple[int, int]:
        moved = WaitingLine(-1, "", 1.0, num_moved, 10 * num_moved, 0.0)
        free = free_room(EngineCapacity(8, 10**6), EngineLoad(), 5, num_places)
        shares = deal(free, {"a": wanted(chat), "b": wanted(moved, line("u", 5))})
        return shares["a"].sequences, shares["b"].sequences

    assert given(num_places=5, num_moved=2) == (0, 2)
    assert given(num_places=4, num_moved=9) == (0, 3)
    assert given(num_places=7, num_moved=1) == (1, 1)
    assert given(num_places=7, num_moved=2) == (0, 2)


def test_what_was_told_of_no_line_comes_after_its_class() -> None:
    batch = line("t", 9, ServiceClass.BATCH)
    demands = {"a": wanted(line("t", 2), rest=20), "b": wanted(line("t", 4)), "c": wanted(batch)}
    assert dealt(demands, 8) == {"a": 4, "b": 4, "c": 0}
    assert dealt(demands, 30) == {"a": 22, "b": 4, "c": 4}


def test_a_gateway_that_tells_of_no_lines_has_turns_like_a_tenant() -> None:
    assert dealt({"old": RoomWanted(9, 90), "new": wanted(line("t", 9))}, 6) == {"old": 3, "new": 3}


def test_who_leaves_room_gets_none_of_what_is_kept() -> None:
    demands = {"a": wanted(line("flood", 50)), "b": wanted(line("few", 1))}
    order = {"leaves_room": lambda account: account[1] == "flood", "kept_sequences": 4}
    shares = deal(FreeRoom(10, 10**6, None), demands, order=DealingOrder(**order))
    # What is kept is told to all, so that others need not ask: four in equal parts.
    assert {name: share.sequences for name, share in shares.items()} == {"a": 7, "b": 3}
    shares = deal(FreeRoom(4, 10**6, None), demands, order=DealingOrder(**order))
    assert {name: share.sequences for name, share in shares.items()} == {"a": 2, "b": 3}
    order = {"leaves_room": lambda account: account[1] == "flood", "kept_prefill": 875}
    shares = deal(FreeRoom(10, 890, None), demands, order=DealingOrder(**order))
    assert [share.prefill_tokens for share in shares.values()] == [445, 445]


lines_of = st.lists(
    st.builds(
        WaitingLine,
        st.integers(-1, 2),
        st.sampled_from("abcd"),
        st.sampled_from([0.5, 1.0, 3.0]),
        st.integers(0, 20),
        st.integers(0, 5000),
        st.floats(0, 1e5),
    ),
    max_size=5,
)


@given(st.integers(1, 64), st.lists(lines_of, min_size=1, max_size=5), st.integers(0, 9))
def test_no_place_is_left_lying_and_none_dealt_twice_whatever_lines_there_are(
    sequences: int, lines: list[list[WaitingLine]], first: int
) -> None:
    demands = {
        number: RoomWanted(
            sum(each.num_requests for each in of_gateway),
            sum(each.prefill_tokens for each in of_gateway),
            of_gateway,
        )
        for number, of_gateway in enumerate(lines)
    }
    shares = deal(FreeRoom(sequences, 10**9, None), demands, order=DealingOrder(first=first))
    total = sum(share.sequences for share in shares.values())
    num_wanted = sum(demand.num_requests for demand in demands.values())
    if num_wanted >= sequences:
        assert total == sequences
        assert all(
            share.sequences <= demands[number].num_requests for number, share in shares.items()
        )
    else:
        assert sequences <= total < sequences + len(demands)
        assert all(
            share.sequences >= demands[number].num_requests for number, share in shares.items()
        )


demands_of = st.dictionaries(
    st.integers(0, 15),
    st.builds(RoomWanted, st.integers(0, 50), st.integers(0, 50_000)),
    min_size=1,
)


@given(st.integers(-5, 64), st.integers(-5000, 20_000), demands_of, st.integers(0, 99))
def test_at_most_one_request_a_gateway_too_many_is_promised(
    sequences: int, prefill: int, demands: dict[int, RoomWanted], first: int
) -> None:
    shares = deal(FreeRoom(sequences, prefill, None), demands, order=DealingOrder(first=first))
    total = sum(share.sequences for share in shares.values())
    if sequences <= 0 or prefill <= 0:
        assert total == 0
    else:
        assert total < sequences + len(demands)
        wanted = sum(demand.num_requests for demand in demands.values())
        tokens = sum(share.prefill_tokens for share in shares.values())
        # Nothing is left lying while somebody waits for it.
        assert total >= min(sequences, wanted) or tokens >= prefill


@given(st.integers(1, 64), demands_of)
def test_shares_of_those_that_wait_differ_by_one_at_most(
    sequences: int, demands: dict[int, RoomWanted]
) -> None:
    shares = deal(FreeRoom(sequences, 10**9, None), demands)
    short = [
        shares[name].sequences
        for name, demand in demands.items()
        if shares[name].sequences < demand.num_requests
    ]
    assert not short or max(short) - min(short) <= 1


def rooms_of(*gateways: str) -> GatewayRooms[str]:
    rooms: GatewayRooms[str] = GatewayRooms(CAPACITY)
    for gateway in gateways:
        rooms.opened(gateway)
    return rooms


def test_a_gateway_hears_of_room_when_its_link_opens() -> None:
    rooms = rooms_of("a")
    rooms.look(EngineLoad(), 0, 0.0)
    assert rooms.to_tell == ["a"]
    assert rooms.room_of("a").num_requests == 8
    assert rooms.to_tell == []


def test_a_request_on_its_way_is_not_news_to_its_gateway() -> None:
    rooms = rooms_of("a")
    rooms.look(EngineLoad(), 0, 0.0)
    rooms.room_of("a")
    rooms.took("a", 600)
    rooms.look(EngineLoad(0, 1, backlog_tokens=600), 1, 0.0)
    assert rooms.to_tell == []


def test_gateway_hears_at_once_of_what_others_have_put_in_line() -> None:
    rooms = rooms_of("a", "b")
    rooms.look(EngineLoad(), 0, 0.0)
    for gateway in ("a", "b"):
        rooms.room_of(gateway)
    rooms.took("a", 511)
    rooms.look(EngineLoad(0, 1, backlog_tokens=511), 1, 0.0)
    assert rooms.to_tell == []
    rooms.took("a", 1)
    rooms.look(EngineLoad(0, 2, backlog_tokens=512), 2, 0.0)
    assert rooms.to_tell == ["b"]
    assert rooms.room_of("b").backlog_tokens == 512
    assert rooms.to_tell == []
    # It is computed: nobody has a step of its own by which to hear of that.
    rooms.look(EngineLoad(2), 2, 0.0)
    assert rooms.to_tell == ["a", "b"]


def test_gateway_with_something_waiting_hears_of_its_part_and_not_of_each_change() -> None:
    gateways = ["a", "b", *(f"gw{number}" for number in range(14))]
    rooms: GatewayRooms[str] = GatewayRooms(EngineCapacity(1024, 8192))
    for gateway in gateways:
        rooms.opened(gateway)
    rooms.wanted("b", RoomWanted(1, 100), 0.0)
    rooms.look(EngineLoad(), 0, 0.0)
    for gateway in gateways:
        rooms.room_of(gateway)
    rooms.took("a", 600)
    rooms.look(EngineLoad(0, 1, backlog_tokens=600), 1, 0.0)
    assert rooms.to_tell == gateways[2:]
    rooms.wanted("b", RoomWanted(), 0.0)
    rooms.look(EngineLoad(0, 1, backlog_tokens=600), 1, 0.0)
    assert rooms.to_tell == gateways[1:]


def test_cached_part_of_a_prompt_on_its_way_is_no_news_to_its_gateway() -> None:
    rooms = rooms_of("a")
    rooms.look(EngineLoad(computed_ratio=0.1), 0, 0.0)
    rooms.room_of("a")
    rooms.took("a", 9000)
    rooms.look(EngineLoad(0, 1, backlog_tokens=900, computed_ratio=0.1), 1, 0.0)
    assert rooms.to_tell == []


def test_gateway_hears_at_once_of_sequences_that_others_have_begun() -> None:
    others = [f"gw{number}" for number in range(15)]
    rooms: GatewayRooms[str] = GatewayRooms(EngineCapacity(1024, 8192))
    for gateway in ("a", *others):
        rooms.opened(gateway)
    rooms.look(EngineLoad(), 0, 0.0)
    for gateway in ("a", *others):
        rooms.room_of(gateway)
    for num in range(1, 5):
        assert rooms.to_tell == []
        rooms.took("a", 1)
        rooms.look(EngineLoad(num), num, 0.0)
    assert rooms.to_tell == others


def test_gateway_hears_at_once_of_sequences_that_others_have_ended() -> None:
    rooms = rooms_of("a", "b")
    rooms.look(EngineLoad(4), 4, 0.0)
    for gateway in ("a", "b"):
        rooms.room_of(gateway)
    rooms.look(EngineLoad(1), 1, 0.0)
    assert rooms.to_tell == []
    rooms.look(EngineLoad(), 0, 0.0)
    assert rooms.to_tell == ["a", "b"]


def test_a_full_engine_tells_at_once_that_it_has_room_again() -> None:
    rooms = rooms_of("a")
    rooms.look(EngineLoad(8), 8, 0.0)
    rooms.room_of("a")
    assert rooms.to_tell == []
    rooms.look(EngineLoad(7), 7, 0.0)
    assert rooms.to_tell == ["a"]


def test_a_promise_that_others_have_used_is_taken_back() -> None:
    rooms = rooms_of("a", "b")
    rooms.look(EngineLoad(), 0, 0.0)
    assert [rooms.room_of(gateway).num_requests for gateway in ("a", "b")] == [4, 4]
    rooms.look(EngineLoad(8), 8, 0.0)
    assert rooms.to_tell == ["a", "b"]
    assert rooms.room_of("a").num_requests == 0


def test_who_asks_gets_what_is_free_at_once() -> None:
    rooms = rooms_of("a", "b")
    rooms.look(EngineLoad(), 0, 0.0)
    for gateway in ("a", "b"):
        rooms.room_of(gateway)
    for _ in range(4):
        rooms.took("a", 10)
    rooms.wanted("a", RoomWanted(20, 200), 0.0)
    rooms.look(EngineLoad(0, 4), 4, 0.0)
    assert "a" in rooms.to_tell
    told = rooms.room_of("a")
    assert (told.num_taken, told.num_requests) == (4, 4)
    assert rooms.room_of("b").num_requests == 0


def test_a_gateway_that_left_has_no_part() -> None:
    rooms = rooms_of("a", "b")
    rooms.wanted("a", RoomWanted(100, 100), 0.0)
    rooms.left("a", 0.0)
    rooms.look(EngineLoad(), 0, 0.0)
    assert rooms.room_of("b").num_requests == 8


def test_places_beyond_an_objective_are_told_to_be_for_what_was_on_an_engine_before() -> None:
    rooms = rooms_of("a", "b")
    moved = WaitingLine(-1, "", 1.0, 2, 20, 0.0)
    rooms.wanted("a", RoomWanted(12, 120, [moved, line("t", 10)], tpot_s=0.05), 1.0)
    rooms.wanted("b", RoomWanted(9, 90, [line("t", 9)], tpot_s=0.05), 1.0)
    rooms.began("a", "r", request_of(ServiceClass.STANDARD), 1.0)
    rooms.stepped(seconds(8, 0.1), 1.0)
    assert rooms.num_places == 5
    rooms.look(EngineLoad(4), 4, 1.0)
    told = rooms.room_of("a")
    assert (told.num_requests, told.num_for_moved) == (2, 1)
    assert rooms.room_of("b").num_requests == 0
    # One ends, and the place that was for a moved one is anybody's: its gateway hears at once.
    rooms.took("a", 10)
    rooms.wanted("a", RoomWanted(10, 100, [line("t", 10)], tpot_s=0.05), 2.0)
    rooms.wanted("b", RoomWanted(tpot_s=0.05), 2.0)
    rooms.look(EngineLoad(5), 5, 2.0)
    assert rooms.to_tell == []
    rooms.look(EngineLoad(4), 4, 2.0)
    assert rooms.to_tell == ["a"]
    assert rooms.room_of("a").num_for_moved == 0


def request_of(service_class: ServiceClass) -> ChargedRequest:
    return ChargedRequest((service_class, "t"), 1.0, 10.0, prompt_tokens=10)


def test_an_engine_with_batch_work_alone_keeps_no_objective() -> None:
    rooms = rooms_of("a")
    rooms.wanted("a", RoomWanted(tpot_s=0.05), 0.0)
    rooms.began("a", "batch", request_of(ServiceClass.BATCH), 0.0)
    rooms.stepped(seconds(8, 0.1), 1.0)
    assert rooms.num_places == 8
    chat = request_of(ServiceClass.STANDARD)
    rooms.began("a", "chat", chat, 2.0)
    rooms.stepped(seconds(8, 0.1), 3.0)
    assert rooms.num_places == 5
    rooms.stepped(seconds(8, 0.1), 100.0)
    rooms.ended("chat", chat)
    rooms.stepped(seconds(8, 0.1), 130.0)
    assert rooms.num_places < 8, "others may come again"
    rooms.stepped(seconds(8, 0.1), 160.0)
    assert rooms.num_places == 8


def seconds(num_sequences: int, step_s: float, busy_s: float = 60.0) -> StepSums:
    """So much time in steps of that length; a minute, after which nothing before counts."""
    num_steps = busy_s / step_s
    return StepSums(num_sequences * num_steps, num_steps, busy_s)


def test_an_engine_whose_steps_are_too_long_has_fewer_places() -> None:
    rooms = rooms_of("a", "b")
    rooms.began("a", "r", request_of(ServiceClass.STANDARD), 0.0)
    rooms.stepped(seconds(8, 0.1), 1.0)
    assert rooms.num_places == 8  # nobody told an objective
    rooms.wanted("a", RoomWanted(tpot_s=0.08), 1.0)
    rooms.wanted("b", RoomWanted(tpot_s=0.05), 1.0)
    rooms.stepped(seconds(8, 0.1), 2.0)
    # Half of the way to 3.6: 80 tokens a second, 0.9 of the 50 ms of the stricter one.
    assert rooms.num_places == 5
    rooms.look(EngineLoad(5), 5, 2.0)
    assert rooms.room_of("a").num_requests == 0
    rooms.left("b", 3.0)
    rooms.stepped(seconds(5, 0.05), 3.0)
    assert rooms.num_places == 7
    rooms.wanted("a", RoomWanted(), 4.0)
    rooms.stepped(seconds(8, 0.1), 4.0)
    assert rooms.num_places == 8


def test_what_is_done_between_two_looks_is_the_difference_of_sums() -> None:
    watch = StepWatch()
    first = EngineStats(generation_tokens=100, num_steps=10, busy_s=1.0, drafts=(10, 30, 5))
    assert watch.is_due(5.0)
    assert watch.look(first, 5.0) == StepSums()
    assert not watch.is_due(5.9)
    assert watch.is_due(6.0)
    then = EngineStats(generation_tokens=160, num_steps=16, busy_s=1.5, drafts=(20, 60, 20))
    # Of 60 tokens 15 were drafts: a step gave a sequence four thirds, so six gave as much as eight.
    assert watch.look(then, 6.0) == StepSums(60, 8, 0.5)
