"""Every chip-second once, in one state, whatever the directory and the clocks do."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.directory.supply_book import SupplyBook
from serving.domain.slice_lifecycle import (
    EndCause,
    LoadStage,
    SliceLifecycle,
    SliceState,
    Transition,
)
from serving.domain.slice_records import EngineRecord, SliceRecord, Snapshot
from serving.domain.supply.faults import SliceFaults
from serving.ledger.ledger import (
    MAX_BATCHES,
    MAX_UNLISTED,
    UNATTRIBUTED,
    BatchUse,
    EngineUse,
    Ledger,
    shares,
)
from serving.ledger.states import LedgerState, StateSpan, spans
from tests.supply_builders import group_of, hosts_of, life, pods_of

# A v6e 2x4 has 8 chips.
CHIPS = 8
ORDER = [state for state in SliceState if state is not SliceState.GONE]
COMPILING = LoadStage.COMPILING


def record(
    *transitions: tuple[SliceState, float],
    replica_id: str = "r",
    compute_class: str = "spot",
    engine_id: str | None = "e",
) -> SliceRecord:
    life = SliceLifecycle(
        tuple(Transition(state, at_s, "the test says so") for state, at_s in transitions)
    )
    return SliceRecord(replica_id, "chat", compute_class, life, "v6e", "2x4", engine_id=engine_id)


def ended(what: SliceRecord, at_s: float) -> SliceRecord:
    return replace(what, life=what.life.end(EndCause.PREEMPTED, at_s, "the test says so"))


def listing(*records: SliceRecord, over: tuple[SliceRecord, ...] = ()) -> Snapshot:
    return Snapshot("v", records, over)


def seconds(ledger: Ledger) -> dict[LedgerState, float]:
    """Chip-seconds by state, of all classes."""
    sums: Counter[LedgerState] = Counter()
    for entry in ledger.totals():
        sums[entry.state] += entry.amount
    return {state: amount / 1000 for state, amount in sums.items()}


WHOLE = (
    (SliceState.REQUESTED, 0.0),
    (SliceState.PROVISIONING, 10.0),
    (SliceState.RESERVED, 110.0),
    (SliceState.PROBING, 112.0),
    (SliceState.LOADING, 120.0),
    (SliceState.READY, 200.0),
)


def test_every_phase_of_a_life_goes_to_its_state() -> None:
    ledger = Ledger(0)
    life = record(*WHOLE)
    ledger.observe(listing(life), {"e": False}, 250_000)
    ledger.observe(listing(life), {"e": True}, 300_000)
    drained = record(*WHOLE, (SliceState.DRAINING, 310.0))
    ledger.observe(listing(drained), {"e": True}, 312_000)
    ledger.observe(listing(over=(ended(drained, 320.0),)), {}, 400_000)
    assert seconds(ledger) == {
        LedgerState.PROVISIONING: 110 * CHIPS,
        LedgerState.PROBING: 10 * CHIPS,
        LedgerState.LOADING: 80 * CHIPS,
        LedgerState.IDLE: 50 * CHIPS,
        LedgerState.SERVING: (50 + 10) * CHIPS,
        LedgerState.DRAINING: 10 * CHIPS,
    }


def test_loading_is_compiling_from_when_the_engine_says_so() -> None:
    ledger = Ledger(0)
    begun = record((SliceState.LOADING, 0.0))
    compiling = begun.life.enter(SliceState.LOADING, 30.0, "it compiles", stage=COMPILING)
    ready = compiling.enter(SliceState.READY, 90.0, "")
    ledger.observe(listing(replace(begun, life=ready)), {"e": False}, 100_000)
    assert seconds(ledger) == {
        LedgerState.LOADING: 30 * CHIPS,
        LedgerState.COMPILING: 60 * CHIPS,
        LedgerState.IDLE: 10 * CHIPS,
    }
    ledger = Ledger(0)
    ledger.observe(listing(replace(begun, life=compiling)), {}, 50_000)
    assert [each.state for each in ledger.chips()] == [LedgerState.COMPILING]


def test_ready_engine_that_cannot_be_reached_is_lost() -> None:
    ledger = Ledger(0)
    snapshot = listing(record((SliceState.READY, 0.0)))
    ledger.observe(snapshot, {"e": True}, 10_000)
    ledger.observe(snapshot, {}, 14_000)
    assert seconds(ledger) == {LedgerState.SERVING: 10 * CHIPS, LedgerState.LOST: 4 * CHIPS}
    assert [(each.state, each.amount) for each in ledger.chips()] == [(LedgerState.LOST, CHIPS)]


def test_life_that_ended_counts_to_its_end_and_has_no_chips() -> None:
    ledger = Ledger(0)
    life = record((SliceState.LOADING, 0.0))
    ledger.observe(listing(life), {}, 5_000)
    ledger.observe(listing(over=(ended(life, 7.0),)), {}, 60_000)
    assert seconds(ledger) == {LedgerState.LOADING: 7 * CHIPS}
    assert (ledger.chips(), ledger.slices()) == ([], [])


def test_directory_that_restarts_costs_nothing_and_counts_nothing_twice() -> None:
    ledger = Ledger(0)
    life = record((SliceState.LOADING, 0.0))
    ledger.observe(listing(life), {}, 10_000)
    ledger.observe(listing(), {}, 11_000)
    assert seconds(ledger) == {LedgerState.LOADING: 10 * CHIPS}
    ledger.observe(listing(life), {}, 15_000)
    assert seconds(ledger) == {LedgerState.LOADING: 15 * CHIPS}


def test_replica_that_was_presumed_gone_goes_on_where_it_was() -> None:
    ledger = Ledger(0)
    life = record((SliceState.LOADING, 0.0))
    ledger.observe(listing(over=(ended(life, 10.0),)), {}, 10_000)
    ledger.observe(listing(life), {}, 30_000)
    assert seconds(ledger) == {LedgerState.LOADING: 30 * CHIPS}


def test_two_lives_of_one_replica_are_two() -> None:
    ledger = Ledger(0)
    first, second = record((SliceState.LOADING, 0.0)), record((SliceState.LOADING, 20.0))
    ledger.observe(listing(first), {}, 10_000)
    ledger.observe(listing(second, over=(ended(first, 20.0),)), {}, 30_000)
    assert seconds(ledger) == {LedgerState.LOADING: 30 * CHIPS}


def test_what_was_before_the_ledger_is_not_counted() -> None:
    ledger = Ledger(100_000)
    old = ended(record((SliceState.READY, 0.0), replica_id="old"), 50.0)
    ledger.observe(listing(record((SliceState.LOADING, 90.0)), over=(old,)), {}, 101_000)
    assert seconds(ledger) == {LedgerState.LOADING: 1 * CHIPS}


def test_phase_ahead_of_our_clock_counts_when_it_has_come() -> None:
    ledger = Ledger(0)
    life = record((SliceState.LOADING, 0.0), (SliceState.READY, 10.5))
    ledger.observe(listing(life), {"e": False}, 10_000)
    assert seconds(ledger) == {LedgerState.LOADING: 10 * CHIPS}
    ledger.observe(listing(life), {"e": False}, 11_000)
    assert seconds(ledger) == {LedgerState.LOADING: 10.5 * CHIPS, LedgerState.IDLE: 0.5 * CHIPS}


def test_clock_that_goes_back_counts_nothing() -> None:
    ledger = Ledger(0)
    snapshot = listing(record((SliceState.LOADING, 0.0)))
    ledger.observe(snapshot, {}, 10_000)
    ledger.observe(snapshot, {}, 5_000)
    assert seconds(ledger) == {LedgerState.LOADING: 10 * CHIPS}


def test_class_without_slices_has_no_chips_to_count() -> None:
    ledger = Ledger(0)
    local = replace(record((SliceState.READY, 0.0)), generation=None, topology=None)
    ledger.observe(listing(local), {"e": True}, 10_000)
    assert (ledger.totals(), ledger.chips()) == ([], [])


def test_slice_is_told_by_name_while_it_is_held() -> None:
    ledger = Ledger(0)
    life = record((SliceState.REQUESTED, 0.0))
    ledger.observe(listing(life), {}, 10_000)
    assert ledger.slices() == []
    named = replace(life, life=life.life.enter(SliceState.RESERVED, 10.0, "", slice_name="s-1"))
    ledger.observe(listing(named), {}, 12_000)
    assert [(each.slice_name, each.state, each.amount) for each in ledger.slices()] == [
        ("s-1", LedgerState.PROBING, 2_000 * CHIPS),
        ("s-1", LedgerState.PROVISIONING, 10_000 * CHIPS),
    ]


def test_memory_of_lives_that_are_gone_is_bounded_and_keeps_the_latest() -> None:
    ledger = Ledger(0)
    lives = [record((SliceState.LOADING, 0.0), replica_id=str(i)) for i in range(MAX_UNLISTED + 1)]
    ledger.observe(listing(*lives), {}, 1_000)
    ledger.observe(listing(), {}, 1_000)
    before = seconds(ledger)
    ledger.observe(listing(lives[-1]), {}, 1_000)
    assert seconds(ledger) == before
    ledger.observe(listing(lives[0]), {}, 1_000)
    assert seconds(ledger) != before


def test_life_that_is_over_takes_no_more_time() -> None:
    life = ended(record((SliceState.LOADING, 0.0)), 7.0).life
    assert list(spans(life, 2_000, 60_000, LedgerState.IDLE)) == [
        StateSpan(LedgerState.LOADING, 5_000)
    ]


@pytest.mark.parametrize("state", LedgerState)
def test_only_what_is_not_held_is_not_paid(state: LedgerState) -> None:
    assert state.is_paid == (state != "provisioning")


# -- tenants --

READY = (SliceState.READY, 0.0)


def parts(ledger: Ledger) -> dict[str, tuple[float, int]]:
    """Chip-seconds and tokens by tenant."""
    return {each.tenant: (each.chip_ms / 1000, each.tokens) for each in ledger.tenants()}


def served(ledger: Ledger, now_s: float, use: EngineUse) -> None:
    ledger.observe(SERVED, {"e": True}, round(now_s * 1000), {"e": use})


SERVED = listing(record(READY))


def test_serving_is_shared_by_the_tokens_of_the_interval() -> None:
    ledger = Ledger(0)
    served(ledger, 10.0, EngineUse({"acme": 30, "zeta": 10}))
    served(ledger, 20.0, EngineUse({"acme": 30, "zeta": 20}))
    assert parts(ledger) == {
        "acme": (7.5 * CHIPS, 30),
        "zeta": ((2.5 + 10) * CHIPS, 20),
    }


def test_serving_without_a_token_is_shared_by_sequences_and_then_by_our_own() -> None:
    ledger = Ledger(0)
    served(ledger, 4.0, EngineUse({}, {"acme": 3, "zeta": 1}, {"own": 1}))
    served(ledger, 5.0, EngineUse({}, {}, {"own": 1}))
    served(ledger, 6.0, EngineUse())
    assert parts(ledger) == {
        "acme": (3.0 * CHIPS, 0),
        "zeta": (1.0 * CHIPS, 0),
        "own": (1.0 * CHIPS, 0),
        UNATTRIBUTED: (1.0 * CHIPS, 0),
    }


def test_tokens_from_before_the_ledger_are_not_counted() -> None:
    ledger = Ledger(5_000)
    served(ledger, 6.0, EngineUse({"acme": 100}))
    served(ledger, 7.0, EngineUse({"acme": 104}))
    assert parts(ledger)["acme"] == (1.0 * CHIPS, 4)


def test_tokens_of_an_idle_engine_are_counted_all_the_same() -> None:
    ledger = Ledger(0)
    ledger.observe(SERVED, {"e": False}, 1_000, {"e": EngineUse({"acme": 7})})
    assert parts(ledger) == {"acme": (0.0, 7)}


@given(
    st.integers(0, 10**9),
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 10**6), max_size=6),
)
def test_shares_sum_to_the_whole_and_none_is_negative(amount: int, weights: dict[str, int]) -> None:
    found = shares(amount, weights)
    assert sum(found.values()) == amount
    assert all(part >= 0 for part in found.values())
    total = sum(weights.values())
    for tenant, weight in weights.items():
        assert abs(found.get(tenant, 0) - amount * weight / max(total, 1)) < len(weights) + 1 or (
            not total
        )


# -- batches --


def of(**batches: int) -> dict[str, dict[str, int]]:
    return {"acme": batches}


def test_batch_costs_its_part_of_the_tokens_of_its_tenant() -> None:
    ledger = Ledger(0)
    tokens = {"acme": 30, "zeta": 10}
    served(ledger, 10.0, EngineUse(tokens, batches=BatchUse(of(b1=20, b2=5))))
    # 300 of 400 parts are the tenant's: 200, 50 and the 50 of its other requests.
    assert ledger.batch("b1") == {"spot": 5_000 * CHIPS}
    assert ledger.batch("b2") == {"spot": 1_250 * CHIPS}
    assert parts(ledger)["acme"][0] == 7.5 * CHIPS
    tokens = {"acme": 30, "zeta": 20}
    served(ledger, 20.0, EngineUse(tokens, batches=BatchUse(of(b1=20, b2=5))))
    assert ledger.batch("b1") == {"spot": 5_000 * CHIPS}
    assert ledger.batch("unknown") == {}


def test_batch_without_a_token_costs_its_part_of_sequences_and_then_of_our_own() -> None:
    ledger = Ledger(0)
    own = BatchUse(in_flight=of(b1=1))
    served(ledger, 4.0, EngineUse({}, {"acme": 4}, batches=BatchUse(sequences=of(b1=3))))
    served(ledger, 6.0, EngineUse({}, {}, {"acme": 2}, own))
    served(ledger, 7.0, EngineUse(None, None, {"acme": 1}, own))
    assert ledger.batch("b1") == {"spot": (3_000 + 1_000 + 1_000) * CHIPS}


def test_batch_that_the_engine_has_forgotten_begins_at_zero() -> None:
    ledger = Ledger(0)
    served(ledger, 1.0, EngineUse({"acme": 100}, batches=BatchUse(of(b1=100))))
    served(ledger, 2.0, EngineUse({"acme": 110}))
    served(ledger, 3.0, EngineUse({"acme": 120}, batches=BatchUse(of(b1=10))))
    assert ledger.batch("b1") == {"spot": 2_000 * CHIPS}


def test_tokens_of_a_batch_from_before_the_ledger_are_not_counted() -> None:
    ledger = Ledger(5_000)
    served(ledger, 6.0, EngineUse({"acme": 100}, {"acme": 1}, batches=BatchUse(of(b1=100))))
    served(ledger, 7.0, EngineUse({"acme": 104}, batches=BatchUse(of(b1=101))))
    assert ledger.batch("b1") == {"spot": 250 * CHIPS}


def test_memory_of_batches_is_bounded_and_keeps_those_that_were_charged_last() -> None:
    ledger = Ledger(0)
    every = dict.fromkeys((f"b{number}" for number in range(MAX_BATCHES)), 1)
    served(ledger, 1000.0, EngineUse({"acme": MAX_BATCHES}, batches=BatchUse(of(**every))))
    assert all(ledger.batch(name) for name in every)
    for number, name in enumerate(("b0", "new"), 1001):
        in_flight = BatchUse(in_flight=of(**{name: 1}))
        served(ledger, float(number), EngineUse(in_flight={"acme": 1}, batches=in_flight))
    assert [name for name in (*every, "new") if not ledger.batch(name)] == ["b1"]


COUNTS = st.dictionaries(st.sampled_from(["", "b1", "b2", "b3"]), st.integers(0, 50))


@given(
    st.lists(st.tuples(COUNTS, COUNTS, COUNTS, st.booleans()), min_size=1, max_size=8),
    st.integers(1, 2_000),
)
def test_batches_and_the_rest_sum_to_what_their_tenant_is_charged(
    looks: list[tuple[dict[str, int], ...]], step_ms: int
) -> None:
    """Charged as one, as the batches of a tenant, and as tenants of their own."""
    whole, divided = Ledger(0), Ledger(0)
    tokens: Counter[str] = Counter()
    for number, (came, sequences, in_flight, is_known) in enumerate(looks, 1):
        tokens.update(came)

        def sums(counts: Mapping[str, int]) -> dict[str, int]:
            return {"acme": sum(counts.values()), "zeta": 7}

        def batches(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
            return of(**{name: count for name, count in counts.items() if name})

        known = (sums(tokens), sums(sequences)) if is_known else (None, None)
        use = EngineUse(*known, sums(in_flight))
        by_batch = BatchUse(
            batches(tokens) if is_known else {},
            batches(sequences) if is_known else {},
            batches(in_flight),
        )
        now_s = number * step_ms / 1000
        served(whole, now_s, use)
        served(divided, now_s, replace(use, batches=by_batch))
    assert parts(divided) == parts(whole)
    charged = parts(whole).get("acme", (0.0, 0))[0] * 1000
    of_batches = sum(sum(divided.batch(name).values()) for name in ("b1", "b2", "b3"))
    assert of_batches <= round(charged)
    if not any(each.get("") for look in looks for each in look[:3]):
        assert of_batches == round(charged)


# -- conservation --

at_s = st.integers(0, 10**6).map(lambda ms: ms / 1000)


@st.composite
def lives(draw: st.DrawFn, replica_id: str) -> SliceRecord:
    """A life of any of the states in their order, at any instants, ended or not."""
    chosen = sorted(draw(st.sets(st.sampled_from(ORDER), min_size=1)), key=ORDER.index)
    instants = sorted(draw(st.lists(at_s, min_size=len(chosen), max_size=len(chosen))))
    life = record(*zip(chosen, instants, strict=True), replica_id=replica_id, engine_id=replica_id)
    if life.state is SliceState.LOADING and draw(st.booleans()):
        compiling = life.life.enter(SliceState.LOADING, draw(at_s), "it compiles", stage=COMPILING)
        life = replace(life, life=compiling)
    life = replace(life, compute_class=draw(st.sampled_from(["spot", "on-demand"])))
    return ended(life, draw(at_s)) if draw(st.booleans()) else life


def as_of(whole: SliceRecord, now_s: float) -> SliceRecord | None:
    """The record as it was at a time; `None` before its life began."""
    transitions = tuple(
        transition for transition in whole.life.transitions if transition.at_s <= now_s
    )
    if not transitions:
        return None
    cause = whole.life.cause if transitions[-1].state is SliceState.GONE else None
    return replace(whole, life=replace(whole.life, transitions=transitions, cause=cause))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[SliceRecord], list[tuple[float, set[str], set[str]]]]:
    """Lives, and looks at them: when, who is missing from the list, who is busy."""
    fleet = [draw(lives(f"r{i}")) for i in range(draw(st.integers(1, 4)))]
    names = st.sets(st.sampled_from([life.replica_id for life in fleet]))
    looks = draw(st.lists(st.tuples(at_s, names, names), max_size=8))
    return fleet, sorted(looks, key=lambda look: look[0])


@given(histories(), at_s)
def test_states_sum_to_wall_clock_times_chips_without_a_remainder(
    history: tuple[list[SliceRecord], list[tuple[float, set[str], set[str]]]], started_s: float
) -> None:
    fleet, looks = history
    started_ms, end_ms = round(started_s * 1000), 10**6
    ledger = Ledger(started_ms)
    # The last look sees everything, as it is once the directory is whole again.
    for now_s, missing, busy in [*looks, (end_ms / 1000, set[str](), set[str]())]:
        now = [life for each in fleet if (life := as_of(each, now_s)) is not None]
        seen = [life for life in now if life.replica_id not in missing]
        snapshot = listing(
            *(life for life in seen if life.state is not SliceState.GONE),
            over=tuple(life for life in seen if life.state is SliceState.GONE),
        )
        if round(now_s * 1000) >= started_ms:
            use = EngineUse({"acme": round(now_s)}, {"zeta": 1} if busy else {})
            uses = dict.fromkeys(busy, use)
            ledger.observe(snapshot, dict.fromkeys(busy, True), round(now_s * 1000), uses)
    expected: Counter[str] = Counter()
    for each in fleet:
        first_ms, last_ms = (round(each.life.transitions[i].at_s * 1000) for i in (0, -1))
        over_ms = last_ms if each.state is SliceState.GONE else end_ms
        expected[each.compute_class] += max(0, over_ms - max(first_ms, started_ms)) * CHIPS
    found: Counter[str] = Counter()
    for entry in ledger.totals():
        assert entry.amount > 0
        found[entry.compute_class] += entry.amount
    assert found == +expected
    serving = sum(each.amount for each in ledger.totals() if each.state is LedgerState.SERVING)
    assert sum(each.chip_ms for each in ledger.tenants()) == serving
    assert sum(each.amount for each in ledger.chips()) == CHIPS * sum(
        each.state is not SliceState.GONE for each in fleet
    )


def test_slice_that_nobody_has_is_counted_from_when_it_was_seen_so() -> None:
    """Its machines are paid for, and no life counts them."""
    surveyed = SupplyBook(SliceFaults())
    pods = group_of(pods_of("s-0"), pods_of("s-1"), pods_of("s-2", machine=None))
    held = hosts_of("s-1", num_free_chips=0)
    lives = [life("r", held)]
    ledger = Ledger(0)
    surveyed.look(held, [pods], lives, 0.0)  # s-0 boots
    ledger.observe(Snapshot("1", supply=surveyed.records), {}, 10_000)
    surveyed.look([*hosts_of("s-0"), *held], [pods], lives, 10.0)
    ledger.observe(Snapshot("2", supply=surveyed.records), {}, 14_000)
    # Neither what a replica has, which its life counts, nor what has no machine yet.
    assert seconds(ledger) == {LedgerState.BOOTING: 80.0, LedgerState.FREE: 32.0}
    assert {(entry.model, entry.compute_class) for entry in ledger.totals()} == {("", "spot")}
    (free,) = ledger.chips()
    assert (free.state, free.amount) == (LedgerState.FREE, CHIPS)


def test_slice_that_nobody_has_is_not_counted_twice_by_a_clock_that_goes_back() -> None:
    surveyed = SupplyBook(SliceFaults())
    surveyed.look(hosts_of("s-0"), [], [], 0.0)
    ledger, snapshot = Ledger(0), Snapshot("1", supply=surveyed.records)
    for now_ms in (10_000, 5_000, 10_000):
        ledger.observe(snapshot, {}, now_ms)
    assert seconds(ledger) == {LedgerState.FREE: 80.0}


# -- a slice that several engines share --


def divided(*transitions: tuple[SliceState, float]) -> SliceRecord:
    """Two engines of four chips each."""
    others = (EngineRecord("e2", ("10.0.0.1", 7001)),)
    return replace(record(*transitions), num_engines=2, others=others)


def test_one_engine_of_a_divided_slice_serves_while_the_other_idles() -> None:
    ledger = Ledger(0)
    life = divided(*WHOLE)
    uses = {
        "e": EngineUse(tokens={"a": 100}),
        "e2": EngineUse(tokens={}),
    }
    ledger.observe(listing(life), {"e": True, "e2": False}, 250_000, uses)
    found = seconds(ledger)
    assert (found[LedgerState.SERVING], found[LedgerState.IDLE]) == (50 * 4, 50 * 4)
    (part,) = ledger.tenants()
    assert (part.tenant, part.chip_ms, part.tokens) == ("a", 50_000 * 4, 100)
    assert sum(found.values()) == pytest.approx(250 * CHIPS)


def test_each_engine_of_a_divided_slice_is_charged_to_those_who_use_it() -> None:
    ledger = Ledger(0)
    life = divided(*WHOLE)
    busy = {"e": True, "e2": True}
    ledger.observe(listing(life), busy, 200_000, {"e": EngineUse(), "e2": EngineUse()})
    uses = {"e": EngineUse(tokens={"a": 10}), "e2": EngineUse(tokens={"b": 10, "c": 30})}
    ledger.observe(listing(life), busy, 210_000, uses)
    charged = {part.tenant: part.chip_ms for part in ledger.tenants()}
    assert charged == {"a": 10_000 * 4, "b": 10_000, "c": 30_000}


def test_engine_of_a_divided_slice_that_nobody_reaches_is_lost_and_the_other_is_not() -> None:
    ledger = Ledger(0)
    ledger.observe(listing(divided(*WHOLE)), {"e": True}, 250_000)
    found = seconds(ledger)
    assert (found[LedgerState.SERVING], found[LedgerState.LOST]) == (50 * 4, 50 * 4)


def test_divided_slice_that_comes_back_is_not_counted_twice() -> None:
    ledger, life, busy = Ledger(0), divided(*WHOLE), {"e": True, "e2": False}
    ledger.observe(listing(life), busy, 210_000)
    ledger.observe(listing(), busy, 220_000)
    ledger.observe(listing(life), busy, 230_000)
    assert sum(seconds(ledger).values()) == pytest.approx(230 * CHIPS)
    (by_slice,) = [
        sum(entry.amount for entry in ledger.chips()),
    ]
    assert by_slice == CHIPS
