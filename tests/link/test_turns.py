"""At one engine: whose turn it is of all gateways' tenants, and who leaves room for whom."""

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.link.rooms.turns import ChargedRequest, EngineAccount, RecentUse, TenantTurns

INTERACTIVE, STANDARD, BATCH = ServiceClass
FLOOD, FEW = (int(STANDARD), "flood"), (int(STANDARD), "few")


def charged(account: EngineAccount, work: float = 10.0, weight: float = 1.0) -> ChargedRequest:
    return ChargedRequest(account, weight, work, prompt_tokens=10)


def turns_of(*accounts: EngineAccount, at_s: float = 0.0) -> TenantTurns:
    """One request of each, at one time."""
    turns = TenantTurns()
    for account in accounts:
        turns.charge(charged(account), at_s)
    return turns


def test_work_is_charged_by_weight_and_settled_by_what_it_took() -> None:
    turns = TenantTurns()
    request = charged(FLOOD, work=30.0, weight=2.0)
    turns.charge(request, 0.0)
    assert turns.had(FLOOD) == 15.0
    request.num_cached, request.num_outputs = 6, 3  # four computed, and three that weigh two each
    turns.settle(request)
    assert turns.had(FLOOD) == 5.0


def test_what_was_charged_on_another_engine_is_not_charged_here() -> None:
    turns = TenantTurns()
    moved = charged(FLOOD, work=0.0)
    turns.charge(moved, 0.0)
    moved.num_outputs = 50
    turns.settle(moved)
    assert turns.had(FLOOD) == 0.0
    assert not turns.is_batch_leaving(0.0)


def test_who_begins_to_wait_has_saved_up_nothing() -> None:
    turns = turns_of(FLOOD, FLOOD)
    turns.wait({FLOOD}, 0.0)
    turns.wait({FLOOD, FEW}, 0.0)
    assert turns.had(FEW) == turns.had(FLOOD) == 20.0


def test_classes_below_one_that_comes_now_and_then_leave_room() -> None:
    turns = turns_of((int(INTERACTIVE), "chat"))
    assert turns.is_batch_leaving(10.0)
    assert not turns.leaves_room(FLOOD, 10.0), "it has not had to wait"
    turns.wait({FLOOD}, 5.0)
    assert turns.leaves_room(FLOOD, 10.0)
    assert turns.leaves_room((int(BATCH), "night"), 10.0)
    assert not turns.leaves_room((int(INTERACTIVE), "other"), 10.0)
    assert not turns.leaves_room((-1, ""), 10.0), "what has lost its engine leaves none"
    assert not turns.is_batch_leaving(10.1)
    assert not turns_of((int(BATCH), "night")).is_batch_leaving(0.0)


def test_who_has_had_more_than_its_share_and_waits_leaves_room_for_others_who_come() -> None:
    turns = turns_of(FLOOD, FLOOD, FEW)
    turns.wait({FLOOD}, 0.0)
    assert not turns.leaves_room(FLOOD, 2.0), "it may only have asked for its place"
    assert turns.leaves_room(FLOOD, 9.0)
    turns.wait({FLOOD, FEW}, 9.0)
    assert not turns.leaves_room(FEW, 9.9), "it has had less"
    assert not turns.leaves_room(FLOOD, 10.1), "nobody has come for a while"


def test_gateways_hear_of_those_that_leave_room_and_have_to_wait_or_just_had_to() -> None:
    turns = turns_of(FLOOD, FLOOD, FEW)
    turns.wait({FLOOD}, 0.0)
    assert turns.leaving(2.0) == []
    assert turns.leaving(2.1) == [FLOOD]
    turns.wait(set(), 3.0)
    assert turns.leaving(4.0) == [FLOOD], "there may be more at once"
    assert turns.leaving(4.1) == []
    turns.wait({FLOOD}, 3.9)
    assert turns.leaving(4.1) == [FLOOD], "that was no pause"


def test_no_more_accounts_are_told_of_than_a_message_has_room_for() -> None:
    many = [(int(BATCH), f"t{number}") for number in range(100)]
    turns = turns_of(*many)
    turns.wait(set(many), 0.0)
    assert len(turns.leaving(0.0)) == 16


def test_batch_work_leaves_room_for_other_batch_work_that_comes() -> None:
    night, other = (int(BATCH), "night"), (int(BATCH), "other")
    turns = turns_of(night, other)
    assert turns.leaves_room(night, 1.0)
    assert not turns_of(night).leaves_room(night, 1.0)


def test_who_has_waited_for_a_while_is_no_late_comer() -> None:
    turns = turns_of(FEW, FLOOD, FLOOD)
    turns.wait({FLOOD, FEW}, 0.0)
    turns.wait({FLOOD, FEW}, 1.0)
    assert not turns.leaves_room(FLOOD, 2.1), "both wait: what is kept would be nobody's"
    turns.wait({FLOOD}, 3.0)
    assert turns.leaves_room(FLOOD, 3.0), "it has what it asked for"


def test_use_is_forgotten_by_half_in_ten_seconds() -> None:
    use = RecentUse()
    use.add(FLOOD, 100.0, 1.0, 0.0)
    use.add(FEW, 60.0, 1.0, 7.0)
    assert use.is_over_share(FLOOD), "100 are 62 by now"
    use.add(FEW, 10.0, 1.0, 10.0)
    assert not use.is_over_share(FLOOD)
    assert use.is_over_share(FEW)


def test_a_share_is_by_weight() -> None:
    use = RecentUse()
    use.add(FLOOD, 50.0, 5.0, 0.0)
    use.add(FEW, 30.0, 1.0, 0.0)
    assert not use.is_over_share(FLOOD)
    assert use.is_over_share(FEW)


def test_who_has_had_next_to_nothing_for_long_is_forgotten_as_a_part_of_all() -> None:
    use = RecentUse()
    use.add(FEW, 1.0, 1.0, 0.0)
    for second in range(0, 300, 5):
        for account in (FLOOD, (int(STANDARD), "other")):
            use.add(account, 100.0, 1.0, float(second))
    use.add(FLOOD, 1.0, 1.0, 300.0)
    assert use.is_over_share(FLOOD)
    assert not use.is_over_share((int(STANDARD), "other")), "two share it, not three"
    assert not use.is_over_share(FEW)
