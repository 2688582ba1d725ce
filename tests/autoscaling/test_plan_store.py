"""What policies learned is read once, in time or not at all, and never in the way of a policy."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import pytest

from autoscaling.model_scaler import Bounds, ModelScaler, ServeState
from autoscaling.observations import Report, Tokens
from autoscaling.policy.memory import PolicyRecord, encode_memory
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy_config import ModelSettings
from autoscaling.storage.decision_writer import DecisionWriter
from autoscaling.storage.recall import MemoryReader
from serving.domain.capacity.engine_rates import EngineRate, rate_stats
from serving.domain.compute_class import ComputeClass
from serving.domain.load_report import LoadSample, directory_stats, load_stats
from serving.domain.plan_report import ModelPlan, PlanReport
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from tests.autoscaling.policy.policy_world import PROFILE, RULES

TERMS = (
    ComputeClass("spot", 4.0, is_revocable=True, max_slices=50, patience_s=300.0),
    ComputeClass("on-demand", 20.0, max_slices=50),
)
SETTINGS = ModelSettings("m", PROFILE, RULES, TERMS, Tokens(100.0, 100.0))
OTHER = replace(SETTINGS, model="other")
NOW_S = 10_000.0


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def recalled(
    models: Iterable[ModelSettings],
    executor: Executor,
    read: Callable[[str], bytes | None],
    now_s: float = NOW_S,
) -> dict[str, PolicyRecord]:
    """What is known from the start, if the store answers in time."""
    return MemoryReader(models, executor, read).poll(now_s)


def learned() -> PolicyRecord:
    return SlicewisePolicy(PROFILE, TERMS, RULES).to_record(NOW_S)


class Controller:
    """One life of the controller, with spot that was asked for and gives nothing."""

    def __init__(self, store: dict[str, bytes], executor: ThreadPoolExecutor, now_s: float) -> None:
        def remember(model: str, record: PolicyRecord) -> None:
            store[model] = encode_memory(record)

        self.writer = DecisionWriter(executor, self._ignore, remember)
        self.scaler = ModelScaler(SETTINGS, self.writer)
        for memory in recalled([SETTINGS], executor, store.get, now_s).values():
            self.scaler.recall(memory)

    def decide(self, now_s: float, asked_at_s: float) -> ModelPlan:
        life = SliceLifecycle.begin(asked_at_s).enter(SliceState.PROVISIONING, asked_at_s, "none")
        waiting = tuple(SliceRecord(f"r-{n}", "m", "spot", life) for n in range(2))
        stats = directory_stats(Snapshot("v", waiting), 0.0, now_s)
        sample = LoadSample(18.0, 0, 0.0, 0, None, None)
        return self.scaler.decide(
            ServeState(
                now_s,
                {"g": Report(now_s, load_stats("m", sample))},
                (Report(now_s, stats),),
                {"spot": Bounds(2, 0, 50), "on-demand": Bounds(0, 0, 50)},
            )
        )

    def end(self, now_s: float) -> None:
        record = self.scaler.to_record(now_s)
        assert record is not None
        self.writer.remember("m", record)

    @staticmethod
    def _ignore(board: PlanReport) -> None:
        assert board


def test_controller_that_restarts_knows_that_spot_is_dry(executor: ThreadPoolExecutor) -> None:
    store: dict[str, bytes] = {}
    before = Controller(store, executor, NOW_S)
    assert before.decide(NOW_S, NOW_S - 100).targets == {"spot": 2, "on-demand": 0}
    assert before.decide(NOW_S + 300, NOW_S - 100).targets == {"spot": 2, "on-demand": 2}
    before.end(NOW_S + 300)
    executor.submit(lambda: None).result()
    # Its replicas were replaced too, so their orders are young.
    plan = Controller(store, executor, NOW_S + 360).decide(NOW_S + 360, NOW_S + 350)
    assert plan.targets == {"spot": 2, "on-demand": 2}
    assert plan.refusals[0].reason == "backing off: an order is 100 s late"
    forgetful = Controller({}, executor, NOW_S + 360)
    assert forgetful.decide(NOW_S + 360, NOW_S + 350).targets == {"spot": 2, "on-demand": 0}


def reported(now_s: float, rate: float, *rates: EngineRate) -> ServeState:
    """A model at that rate; its engines are full and work waits, where `rates` tell of them."""
    waits = 50 if rates else 0
    sample = LoadSample(
        rate, waits, 1.0 if waits else 0.0, 0, None, None, full_ratio=float(waits > 0)
    )
    told = load_stats("m", sample) | rate_stats("m", rates)
    return ServeState(
        now_s,
        {"g": Report(now_s, told)},
        (Report(now_s, directory_stats(Snapshot("v"), 0.0, now_s)),),
        {"spot": Bounds(2, 0, 50), "on-demand": Bounds(0, 0, 50)},
    )


def half_as_good(scaler: ModelScaler, now_s: float) -> float:
    """Lets full engines show half of what the profile says; returns when they have."""
    engines = [EngineRate(name, "spot", 500.0, 500.0, 0.05) for name in "ab"]
    for number in range(20):
        scaler.decide(reported(now_s + 30.0 * number, 18.0, *engines))
    return now_s + 30.0 * 20


def test_controller_that_restarts_plans_with_what_slices_were_seen_to_carry(
    executor: ThreadPoolExecutor,
) -> None:
    store: dict[str, bytes] = {}
    before = Controller(store, executor, NOW_S)
    now_s = half_as_good(before.scaler, NOW_S)
    before.end(now_s)
    executor.submit(lambda: None).result()
    plan = Controller(store, executor, now_s + 60).scaler.decide(reported(now_s + 60, 18.0))
    assert plan.demand_slices == 4
    assert "slices were seen to carry 0.50 of their profile" in plan.changes[0].reason
    forgetful = Controller({}, executor, now_s + 60).scaler
    assert forgetful.decide(reported(now_s + 60, 18.0)).demand_slices == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "not a memory of version 1"),
        (encode_memory(learned()).replace(b'"version":1', b'"version":0'), "wrong at: version"),
    ],
)
def test_damaged_memory_is_ignored_with_a_reason_and_others_are_used(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, text: bytes, reason: str
) -> None:
    store = {"m": text, "other": encode_memory(learned())}
    with caplog.at_level(logging.INFO, "ray.serve.slicewise"):
        found = recalled([SETTINGS, OTHER], executor, store.get)
    assert found == {"other": learned()}
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("policy_memory_ignored model=m reason=")
    assert reason in warnings[0]
    controller = Controller(store, executor, NOW_S)
    assert controller.decide(NOW_S, NOW_S - 100).targets == {"spot": 2, "on-demand": 0}


def until_done(reader: MemoryReader, executor: ThreadPoolExecutor) -> dict[str, PolicyRecord]:
    """Asks as often as it may take; the executor has one thread, so what was asked is through."""
    for _ in range(3):
        executor.submit(lambda: None).result()
        if found := reader.poll(NOW_S):
            assert reader.is_done
            return found
    raise AssertionError("it was not read")


def test_head_that_is_away_is_asked_again_until_it_answers(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    is_back = threading.Event()

    def away(model: str) -> bytes | None:
        if not is_back.is_set():
            raise ConnectionError(f"no head to ask for {model}")
        return encode_memory(learned())

    reader = MemoryReader([SETTINGS], executor, away)
    assert reader.poll(NOW_S) == {}
    for _ in range(3):
        executor.submit(lambda: None).result()
        assert reader.poll(NOW_S) == {}
        assert not reader.is_done
    assert caplog.text.count("policy_memory_not_read reason=ConnectionError('no head") == 1
    is_back.set()
    assert until_done(reader, executor) == {"m": learned()}


def test_head_that_does_not_answer_is_not_waited_for_and_may_answer_later(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def silent(_model: str) -> bytes | None:
        answers.wait()
        return encode_memory(learned())

    reader = MemoryReader([SETTINGS], executor, silent)
    try:
        assert reader.poll(NOW_S) == {}
        assert not reader.is_done
    finally:
        answers.set()
    assert "policy_memory_not_read reason=TimeoutError" in caplog.text
    assert until_done(reader, executor) == {"m": learned()}


def test_nothing_is_known_the_first_time(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    assert recalled([SETTINGS], executor, lambda _model: None) == {}
    assert caplog.records == []


LARGE = PROFILE.model_copy(update={"generation": "v6e", "topology": "2x4"})
WITH_LARGE = replace(
    SETTINGS,
    terms=(*TERMS, ComputeClass("spot-2x4", 8.0, is_revocable=True)),
    profiles={"spot-2x4": LARGE},
)


class Idle:
    """One life of the controller of a model that has no load; `deployed` are its classes then."""

    def __init__(self, settings: ModelSettings, executor: Executor, memory: bytes | None) -> None:
        writer = DecisionWriter(executor, lambda _: None, lambda *_: None)
        self._scaler = ModelScaler(settings, writer)
        for record in recalled([settings], executor, lambda _: memory).values():
            self._scaler.recall(record)

    def memory(self, *deployed: str) -> PolicyRecord:
        """What it knows after a decision."""
        bounds = {name: Bounds(1, 0, 50) for name in deployed}
        self._scaler.decide(ServeState(NOW_S, {}, (), bounds))
        record = self._scaler.to_record(NOW_S)
        assert record is not None
        return record


def with_losses(record: PolicyRecord, *names: str) -> PolicyRecord:
    """The memory of who lost three slices of each of these classes."""
    lost = {
        name: each.model_copy(update={"num_losses": 3.0})
        for name, each in record.classes.items()
        if name in names
    }
    assert lost.keys() == set(names)
    return record.model_copy(update={"classes": record.classes | lost})


def losses_in(record: PolicyRecord) -> dict[str, int]:
    return {name: round(each.num_losses) for name, each in record.classes.items()}


def test_memory_is_recalled_while_a_class_of_another_shape_has_no_deployment(
    executor: ThreadPoolExecutor,
) -> None:
    for deployed in (("spot",), ("spot", "spot-2x4"), ("spot",)):
        record = Idle(WITH_LARGE, executor, None).memory(*deployed)
        text = encode_memory(record)
        assert recalled([WITH_LARGE], executor, lambda _, it=text: it) == {"m": record}


def test_class_without_a_deployment_keeps_what_was_learned_of_it(
    executor: ThreadPoolExecutor,
) -> None:
    text = encode_memory(with_losses(learned(), "spot", "on-demand"))
    controller = Idle(SETTINGS, executor, text)
    for deployed in (("spot",), ("spot", "on-demand"), ("on-demand",)):
        assert losses_in(controller.memory(*deployed)) == {"spot": 3, "on-demand": 3}


def test_class_of_another_shape_that_comes_or_goes_costs_nothing_of_what_others_know(
    executor: ThreadPoolExecutor,
) -> None:
    whole = Idle(WITH_LARGE, executor, None).memory("spot", "spot-2x4")
    text = encode_memory(with_losses(whole, "spot", "spot-2x4"))
    without = Idle(SETTINGS, executor, text).memory("spot")
    assert losses_in(without) == {"spot": 3}
    again = Idle(WITH_LARGE, executor, encode_memory(without)).memory("spot", "spot-2x4")
    assert losses_in(again) == {"spot": 3, "spot-2x4": 0}


def test_class_whose_slices_are_others_now_begins_anew_and_a_model_whose_are(
    executor: ThreadPoolExecutor,
) -> None:
    whole = Idle(WITH_LARGE, executor, None).memory("spot", "spot-2x4")
    text = encode_memory(with_losses(whole, "spot", "spot-2x4"))
    larger = LARGE.model_copy(update={"topology": "4x4"})
    changed = Idle(replace(WITH_LARGE, profiles={"spot-2x4": larger}), executor, text)
    assert losses_in(changed.memory("spot", "spot-2x4")) == {"spot": 3, "spot-2x4": 0}
    other = replace(SETTINGS, profile=LARGE)
    assert recalled([other], executor, lambda _: text) == {}
