"""The policy as Serve calls it: pickled, made once, called often, its wishes applied by Serve."""

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from test_model_scaler import Sink
from test_plan_store import half_as_good

from autoscaling import serve_policy
from autoscaling.model_scaler import ModelScaler
from autoscaling.policy.memory import PolicyRecord, encode_memory
from autoscaling.policy_config import read_policy_settings
from autoscaling.serve_policy import SlicePolicy
from autoscaling.storage.plan_store import PlanStore
from serving.domain.load_report import LoadSample, directory_stats, load_stats
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot

MODEL = "org/m"
SETTINGS: dict[str, Any] = {
    "decide_every_s": 60.0,
    "models": {
        MODEL: {
            "profile": {
                "model": MODEL,
                "engine": "paced",
                "base_s": 0.025,
                "per_sequence_s": 0.0004,
                "per_prompt_token_s": 0.0001,
                "max_num_seqs": 1000,
                "measured_on": "2026-11-21",
                "source": "made up",
            },
            "objectives": {"ttft_s": 3.0, "tpot_s": 0.05},
            "rules": {"tpot_margin": 1.0, "spread": 0.0, "floor_ratio": 0.0},
            "assumed_tokens": {"input": 100, "output": 100},
            "classes": {"reserved": {}, "spot": {"usd_per_slice_hour": 4.0}},
        }
    },
}
RESERVED, SPOT = "engine-org-m-reserved", "engine-org-m-spot"
Series = Mapping[str, Mapping[ReplicaID, list[TimeStampedValue]]]


def context(
    name: str, target: int, most: int, stats: Mapping[str, float] | None = None, at_s: float = 0.0
) -> AutoscalingContext:
    """What Serve knows of one deployment; one replica runs if it has told `stats`."""
    deployment = DeploymentID(name=name, app_name="slicewise")
    replica = ReplicaID("r", deployment)
    series: Series = {
        metric: {replica: [TimeStampedValue(at_s, value)]}
        for metric, value in (stats or {}).items()
    }
    config = AutoscalingConfig(
        min_replicas=0, max_replicas=most, upscale_delay_s=0.0, downscale_delay_s=0.0
    )
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name=name,
        app_name="slicewise",
        current_num_replicas=target,
        target_num_replicas=target,
        running_replicas=[replica] if stats else [],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=series,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=most,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=at_s,
        config=config,
    )


def contexts(
    now_s: float, rate: float | None = 45.0, reserved: int = 0, spot: int = 0
) -> dict[DeploymentID, AutoscalingContext]:
    """The application at work; with a `rate` of `None` its gateway has told nothing."""
    load = None if rate is None else load_stats(MODEL, LoadSample(rate, 0, 0.0, 0, None, None))
    life = SliceLifecycle.begin(now_s).enter(SliceState.RESERVED, now_s, "held")
    held = tuple(
        SliceRecord(f"{name}-{at}", MODEL, name, life)
        for name, count in (("reserved", reserved), ("spot", spot))
        for at in range(count)
    )
    listed = directory_stats(Snapshot("v", held), now_s - 100, now_s)
    every = (
        context("gateway", 1, 1, load, now_s),
        context("directory", 1, 1, listed, now_s),
        context(RESERVED, reserved, 2),
        context(SPOT, spot, 50),
    )
    return {each.deployment_id: each for each in every}


def by_name(targets: Mapping[DeploymentID, int]) -> dict[str, int]:
    return {deployment.name: target for deployment, target in targets.items()}


@pytest.fixture
def now_s() -> float:
    """The policy reads the wall clock: reports have to be of now."""
    return time.time()


def test_load_becomes_targets_of_the_engines_alone(now_s: float) -> None:
    targets, state = SlicePolicy(**SETTINGS)(contexts(now_s))
    assert by_name(targets) == {RESERVED: 2, SPOT: 3}
    assert state == {}


def test_serve_applies_the_wish_as_it_is(now_s: float) -> None:
    applied = _apply_app_level_autoscaling_config(SlicePolicy(**SETTINGS))
    targets, _ = applied(contexts(now_s, reserved=1, spot=1))
    assert by_name(targets) == {RESERVED: 2, SPOT: 3}


def test_policy_survives_the_pickling_that_serve_does(now_s: float) -> None:
    cloudpickle.register_pickle_by_value(serve_policy)
    try:
        pickled = cloudpickle.dumps(SlicePolicy)
    finally:
        cloudpickle.unregister_pickle_by_value(serve_policy)
    targets, _ = cloudpickle.loads(pickled)(**SETTINGS)(contexts(now_s))
    assert by_name(targets) == {RESERVED: 2, SPOT: 3}


def test_between_decisions_the_last_targets_are_repeated(now_s: float) -> None:
    policy = SlicePolicy(**SETTINGS)
    first, _ = policy(contexts(now_s))
    again, _ = policy(contexts(now_s, rate=900.0))
    assert again == first


def test_missing_metrics_leave_serve_as_it_is(now_s: float) -> None:
    targets, _ = SlicePolicy(**SETTINGS)(contexts(now_s, rate=None, reserved=1, spot=7))
    assert by_name(targets) == {RESERVED: 1, SPOT: 7}


def test_settings_that_cannot_be_used_set_no_target(now_s: float) -> None:
    broken = SETTINGS | {"decide_every_s": -1.0}
    targets, state = SlicePolicy(**broken)(contexts(now_s, reserved=1, spot=7))
    assert (targets, state) == ({}, {})


def test_crash_of_the_adapter_sets_no_target(now_s: float) -> None:
    every = contexts(now_s, reserved=1, spot=7)
    for each in every.values():
        each.raw_metrics = {"load|x": 5}  # no series at all
    assert SlicePolicy(**SETTINGS)(every) == ({}, {})


def test_deployment_that_nobody_plans_for_keeps_its_target(now_s: float) -> None:
    every = contexts(now_s)
    other = context("engine-other-spot", 4, 8)
    targets, _ = SlicePolicy(**SETTINGS)(every | {other.deployment_id: other})
    assert by_name(targets) == {RESERVED: 2, SPOT: 3}


def test_deployment_that_is_gone_gets_no_target(now_s: float) -> None:
    policy = SlicePolicy(**SETTINGS)
    policy(contexts(now_s))
    left = {key: each for key, each in contexts(now_s).items() if key.name != SPOT}
    targets, _ = policy(left)
    assert by_name(targets) == {RESERVED: 2}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("what", ["requests_per_s", "num_waiting", "output_tokens_mean"])
def test_number_that_cannot_be_is_not_learned(now_s: float, what: str, value: float) -> None:
    """One of them made decisions fail for minutes, and the memory could never be written again."""
    policy = SlicePolicy(**SETTINGS | {"decide_every_s": 0.5})
    deployed = contexts(now_s)
    (gateway,) = (each for name, each in deployed.items() if name.name == "gateway")
    (replica,) = gateway.running_replicas
    gateway.raw_metrics[f"load|{MODEL}|{what}"] = {replica: [TimeStampedValue(now_s, value)]}
    assert by_name(policy(deployed)[0]) in ({RESERVED: 0, SPOT: 0}, {RESERVED: 2, SPOT: 3})
    policy._due_at_s = 0.0
    assert by_name(policy(contexts(now_s))[0]) == {RESERVED: 2, SPOT: 3}
    (scaler,) = policy._scalers
    assert scaler.to_record(now_s) is not None


def test_memory_that_could_not_be_read_is_not_written_over(
    now_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head was slow when the controller began: what was learned is there when it is back."""
    is_back = threading.Event()
    stored: dict[str, PolicyRecord] = {}
    (settings,) = read_policy_settings(SETTINGS).models
    # What it learned is by its profile, whatever the model is called.
    before = ModelScaler(replace(settings, model="m"), Sink())
    learned = before.to_record(half_as_good(before, now_s - 900.0))
    assert learned is not None

    def read(_store: PlanStore, model: str) -> bytes:
        if not is_back.is_set():
            raise ConnectionError(f"no head to ask for {model}")
        return encode_memory(learned)

    monkeypatch.setattr(PlanStore, "read_memory", read)
    monkeypatch.setattr(PlanStore, "write_memory", lambda _, model, it: stored.update({model: it}))
    monkeypatch.setattr(PlanStore, "write_report", lambda *_: None)
    policy = SlicePolicy(**SETTINGS)

    def decide() -> dict[str, int]:
        policy._due_at_s = policy._remember_at_s = 0.0
        targets = by_name(policy(contexts(now_s))[0])
        policy._writer._executor.submit(lambda: None).result()
        return targets

    for _ in range(3):
        assert decide() == {RESERVED: 2, SPOT: 3}
    assert stored == {}
    is_back.set()
    for _ in range(3):
        last = decide()
    # Slices carry half of their profile.
    assert last == {RESERVED: 2, SPOT: 7}
    assert stored[MODEL].learned == learned.learned
