"""What is decided is written in order, and what cannot be written is an alert until it can."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.records import ChipShare
from autoscaling.policy.rules import Rules
from autoscaling.records import Fleet, ModelLoad, Observation
from autoscaling.replay import replay_log
from autoscaling.storage.decision_writer import DecisionWriter
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.plan_report import PlanReport

PROFILE = CapacityProfile(
    model="m",
    engine="paced",
    base_s=0.02,
    per_sequence_s=0.001,
    per_prompt_token_s=0.0,
    max_num_seqs=64,
    measured_on="2026-11-21",
    source="made up",
)
TERMS = (ComputeClass("spot", 4.0),)
RULES = Rules(Objectives(3.0, 0.05))
BOARD = PlanReport(written_at_s=1.0, models=())


class Store:
    """Keeps boards, when it can."""

    def __init__(self) -> None:
        self.boards: list[PlanReport] = []
        self.memories: dict[str, PolicyRecord] = {}
        self.is_away = False

    def write(self, board: PlanReport) -> None:
        if self.is_away:
            raise ConnectionError("away")
        self.boards.append(board)

    def remember(self, model: str, record: PolicyRecord) -> None:
        if self.is_away:
            raise ConnectionError("away")
        self.memories[model] = record


def test_log_can_be_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "below" / "decisions.jsonl"
    store = Store()
    before = SlicewisePolicy(PROFILE, TERMS, RULES)
    before.decide(Observation(0.0, ModelLoad(0.0, 9.0, 10.0, 20.0), Fleet((), {})))
    memory = before.to_record(10.0)
    profiles = {"spot": PROFILE.model_copy(update={"base_s": PROFILE.base_s / 2})}
    policy = SlicewisePolicy(PROFILE, TERMS, RULES, memory, profiles)
    with ThreadPoolExecutor(1) as executor:
        writer = DecisionWriter(executor, store.write, store.remember)
        writer.open_log(path)
        writer.begin("m", PROFILE, TERMS, RULES, memory, profiles)
        for tick in range(3):
            at_s = 20.0 + 10.0 * tick
            seen = Observation(at_s, ModelLoad(at_s, 9.0, 10.0, 20.0), Fleet((), {}))
            share = ChipShare({"spot": tick}, {"spot": 1}, frozenset({"spot"}), "shared")
            writer.decided("m", seen, share, policy.decide(seen, share))
        writer.close()
    replay = replay_log(path)
    assert (replay.num_decisions, replay.differences) == (3, ())
    assert writer.alerts == ()


def test_without_a_log_only_the_board_is_written() -> None:
    store = Store()
    with ThreadPoolExecutor(1) as executor:
        writer = DecisionWriter(executor, store.write, store.remember)
        writer.open_log(None)
        writer.begin("m", PROFILE, TERMS, RULES, None, {})
        writer.publish(BOARD)
    assert store.boards == [BOARD]
    assert writer.alerts == ()


def test_log_that_cannot_be_opened_is_an_alert(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "decisions.jsonl"
    store = Store()
    with ThreadPoolExecutor(1) as executor:
        writer = DecisionWriter(executor, store.write, store.remember)
        writer.open_log(path)
    (alert,) = writer.alerts
    assert alert.startswith(f"the decision log {path} cannot be written: ")


def test_board_that_cannot_be_written_is_an_alert_until_it_can() -> None:
    store = Store()
    store.is_away = True
    with ThreadPoolExecutor(1) as executor:
        writer = DecisionWriter(executor, store.write, store.remember)
        writer.publish(BOARD)
        executor.submit(lambda: None).result()
        assert writer.alerts == ("the plan report cannot be written: ConnectionError('away')",)
        store.is_away = False
        writer.publish(BOARD)
    assert writer.alerts == ()


def test_memory_is_written_and_one_that_cannot_be_is_an_alert_until_it_can() -> None:
    store = Store()
    record = SlicewisePolicy(PROFILE, TERMS, RULES).to_record(1.0)
    store.is_away = True
    with ThreadPoolExecutor(1) as executor:
        writer = DecisionWriter(executor, store.write, store.remember)
        writer.remember("m", record)
        executor.submit(lambda: None).result()
        assert writer.alerts == ("the memory of m cannot be written: ConnectionError('away')",)
        store.is_away = False
        writer.remember("m", record)
    assert (writer.alerts, store.memories) == ((), {"m": record})
