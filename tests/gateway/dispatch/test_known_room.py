"""A gateway sends what an engine has room for, and counts what the engine has not seen yet."""

from typing import Any

from serving.gateway.dispatch.known_room import KnownRoom, Need, ToldToLeave
from serving.link.messages import Room


def told(num_taken: int = 0, **changes: Any) -> Room:
    return Room(**({"num_taken": num_taken, "num_requests": 3, "prefill_tokens": 1000} | changes))


def knowing(room: Room, *sent: Need) -> KnownRoom:
    known = KnownRoom()
    known.tell(room)
    for need in sent:
        known.sent(need)
    return known


def test_nothing_is_sent_before_the_engine_has_told_of_room() -> None:
    assert not KnownRoom().has_room_for_moved(Need(1))


def test_so_many_are_sent_as_there_are_places() -> None:
    assert knowing(told(), Need(1), Need(1)).has_room_for_moved(Need(1))
    assert not knowing(told(), Need(1), Need(1), Need(1)).has_room_for_moved(Need(1))


def test_what_the_engine_has_counted_is_not_counted_again() -> None:
    known = knowing(told(), Need(1), Need(1), Need(1))
    known.tell(told(num_taken=2, num_requests=1))
    assert not known.has_place
    known.tell(told(num_taken=3, num_requests=1))
    assert known.has_place


def test_one_prompt_may_be_longer_than_what_is_left_of_the_line() -> None:
    assert knowing(told(), Need(999)).has_room_for_moved(Need(50_000))
    assert not knowing(told(), Need(1000)).has_room_for_moved(Need(1))


def test_of_prompts_the_share_counts_that_was_computed_lately() -> None:
    assert knowing(told(computed_ratio=0.1), Need(9000)).has_place


def test_prompt_and_expected_output_fit_into_the_cache() -> None:
    room = told(kv_tokens=500, num_sequences=2)
    assert knowing(room).has_room_for_moved(Need(300, 200))
    assert not knowing(room).has_room_for_moved(Need(300, 201))
    assert not knowing(room, Need(10)).has_room_for_moved(Need(300, 200))
    assert knowing(room, Need(10)).has_place, "a smaller one fits"


def test_an_engine_without_any_takes_one_however_large() -> None:
    room = told(kv_tokens=500)
    assert knowing(room).has_room_for_moved(Need(4000, 4000))
    assert not knowing(room, Need(1)).has_room_for_moved(Need(4000, 4000))


def test_what_was_sent_stands_in_line_until_the_engine_counts_it() -> None:
    known = knowing(told(num_sequences=4, backlog_tokens=100), Need(20), Need(30))
    assert (known.num_sequences, known.backlog_tokens) == (6, 150)
    known.tell(told(num_taken=2, num_sequences=6, backlog_tokens=140))
    assert (known.num_sequences, known.backlog_tokens) == (6, 140)


def test_a_trial_changes_nothing() -> None:
    known = knowing(told())
    KnownRoom.like(known).sent(Need(2000))
    assert known.has_place


def test_what_was_dealt_to_nobody_is_kept_for_those_who_leave_no_room() -> None:
    assert not knowing(told()).is_kept_free, "an earlier build keeps nothing"
    known = knowing(told(num_dealt=1))
    assert not known.is_kept_free
    known.sent(Need(1))
    assert known.is_kept_free
    assert known.has_place


def test_the_last_places_are_for_what_was_on_an_engine_before() -> None:
    room = told(num_requests=3, num_for_moved=1)
    assert knowing(room, Need(1)).has_place
    known = knowing(room, Need(1), Need(1))
    assert not known.has_place
    assert known.has_place_for_moved
    known.sent(Need(1))
    assert not known.has_place_for_moved


def test_who_leaves_room_is_what_any_engine_says_now() -> None:
    few, batch = (1, "few"), (2, "night")
    leaving = ToldToLeave()
    leaving.tell("e1", told(leaving=[few]))
    leaving.tell("e2", told(leaving=[few], is_batch_leaving=True))
    assert [leaving.has(each) for each in (few, batch, (1, "other"))] == [True, True, False]
    leaving.tell("e2", told())
    assert [leaving.has(each) for each in (few, batch)] == [True, False]
    leaving.forget("e1")
    leaving.forget("e1")
    assert not leaving.has(few)
