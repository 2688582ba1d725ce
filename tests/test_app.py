"""What Serve is told of the application: who scales, within which bounds, and who is only heard."""

from dataclasses import replace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import AutoscalingStateManager
from ray.serve._private.build_app import build_app
from ray.serve._private.common import DeploymentID
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import RayServeException

from serving.app import build, engine_spec
from serving.config.application import check_app_config
from serving.domain import limits
from serving.engine.host import StepSigns, is_at_work
from serving.engine.spec import EngineSpec


def scaling_of(*deployments: dict[str, Any], **sections: Any) -> dict[str, tuple[Any, Any]]:
    """Fixed number of replicas and scaling of each deployment, by name."""
    model = {
        "name": "m",
        "source": "models/slicewise-demo",
        "engine": "paced",
        "deployments": list(deployments),
    }
    application = build({"models": [model], **sections})
    built = build_app(application, name="slicewise", default_runtime_env={})
    configs = {each.name: each._deployment_config for each in built.deployments}
    return {name: (each.num_replicas, each.autoscaling_config) for name, each in configs.items()}


def bounds(config: AutoscalingConfig | None) -> tuple[int, int | None, int]:
    assert config is not None
    return config.min_replicas, config.initial_replicas, config.max_replicas


def test_without_bounds_nothing_scales() -> None:
    found = scaling_of({"compute_class": "local", "replicas": 3}, gateway={"replicas": 2})
    assert {name: count for name, (count, _) in found.items()} == {
        "engine-m-local": 3,
        "gateway": 2,
        "directory": 1,
        "dashboard": 1,
    }
    assert all(scaling is None for _, scaling in found.values())


@pytest.mark.parametrize(
    ("most", "expected", "number"),
    [
        (1, {}, 5),
        (4, {}, 18),
        (4, {"expected_tokens_per_s": 1000, "expected_requests_per_s": 200}, 2),
    ],
)
def test_gateways_of_auto_are_as_many_as_the_most_engines_need(
    most: int, expected: dict[str, Any], number: int
) -> None:
    found = scaling_of(
        {"compute_class": "spot", "min_replicas": 0, "max_replicas": most},
        gateway={"replicas": "auto", **expected},
    )
    assert bounds(found["gateway"][1]) == (number, number, number)


def test_bounded_deployment_scales_by_the_policy_alone_and_others_are_heard() -> None:
    found = scaling_of(
        {"compute_class": "reserved", "min_replicas": 1, "max_replicas": 4, "replicas": 1},
        {"compute_class": "spot", "min_replicas": 0, "max_replicas": 9},
        {"compute_class": "on-demand", "replicas": 1},
        gateway={"replicas": 2},
    )
    scaling = {name: config for name, (_, config) in found.items()}
    assert bounds(scaling["engine-m-reserved"]) == (1, None, 4)
    assert bounds(scaling["engine-m-spot"]) == (0, None, 9)
    assert scaling["engine-m-on-demand"] is None
    assert bounds(scaling["gateway"]) == (2, 2, 2)
    assert bounds(scaling["directory"]) == (1, 1, 1)
    for name in ("engine-m-reserved", "engine-m-spot"):
        each = scaling[name]
        assert each is not None
        assert (each.upscale_delay_s, each.downscale_delay_s) == (0.0, 0.0)
        assert each.downscale_to_zero_delay_s == 0.0
        assert (each.get_upscaling_factor(), each.get_downscaling_factor()) == (1.0, 1.0)


def spot_info(most: int = 100, **sections: Any) -> DeploymentInfo:
    """What Serve keeps of a deployment that scales."""
    deployment = {"compute_class": "spot", "min_replicas": 0, "max_replicas": most}
    model = {"name": "m", "source": "models/slicewise-demo", "engine": "paced"}
    application = build({"models": [model | {"deployments": [deployment]}], **sections})
    built = build_app(application, name="slicewise", default_runtime_env={})
    (given,) = [each._deployment_config for each in built.deployments if "spot" in each.name]
    config = DeploymentConfig.model_construct(
        **{name: getattr(given, name) for name in DeploymentConfig.model_fields}
    )
    return DeploymentInfo(
        deployment_config=config,
        replica_config=ReplicaConfig.create(lambda: None),
        start_time_ms=0,
        deployer_job_id="job",
        actor_name="actor",
        version=given.version,
    )


@pytest.mark.parametrize(
    ("changed", "most"),
    [
        (spot_info(rollout={"drain_s": 240.0}), 100),
        (spot_info(rollout={"step_ratio": 0.5}), 100),
        (spot_info(health={"check_period_s": 2.0}), 100),
        (spot_info(120), 100),
        (spot_info(60), 60),
    ],
)
def test_changed_configuration_keeps_the_replicas_that_the_policy_wanted(
    changed: DeploymentInfo, most: int
) -> None:
    """By Serve's own state: it ends what is more than its target before it asks the policy."""
    serve_state = AutoscalingStateManager()
    deployment = DeploymentID("engine-m-spot", "slicewise")
    assert serve_state.register_deployment(deployment, spot_info(), 0) == 0
    assert serve_state.register_deployment(deployment, changed, 100) == most


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"min_replicas": 1}, "max_replicas: missing; required with models[0].deployments[0].min"),
        ({"max_replicas": 1}, "min_replicas: missing; required with models[0].deployments[0].max"),
        (
            {"min_replicas": 3, "max_replicas": 2},
            "min_replicas: more than the most (value 3); allowed: at most models[0]."
            "deployments[0].max_replicas, 2",
        ),
        (
            {"min_replicas": 1, "max_replicas": 2, "replicas": 3},
            "replicas: a deployment that scales starts with the fewest, and goes on as it is "
            "(value 3); allowed: left out, or models[0].deployments[0].min_replicas, 1",
        ),
        (
            {"replicas": 0},
            "replicas: a deployment that does not scale has an engine (value 0); allowed: at least",
        ),
        ({"min_replicas": 0, "max_replicas": 0}, "max_replicas: not allowed (value 0)"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(given: dict[str, Any], refusal: str) -> None:
    with pytest.raises(RayServeException) as refused:
        scaling_of({"compute_class": "local"} | given)
    assert f"models[0].deployments[0].{refusal}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 2, "one problem, told once"


@pytest.mark.parametrize(
    ("kind", "health", "timeout_s"),
    [
        ("paced", {}, 4.0),
        ("vllm", {}, 20.0),
        ("vllm-tpu", {}, 120.0),
        ("vllm-tpu", {"hang_timeout_s": 9.0}, 9.0),
    ],
)
def test_kind_of_an_engine_says_when_it_hangs(
    kind: str, health: dict[str, Any], timeout_s: float
) -> None:
    spec = spec_with_health(kind, health)
    assert spec.hang_timeout_s == timeout_s
    assert spec.gateway_timeout_s == 30.0


def test_engine_on_tpus_may_compile_for_twelve_minutes_by_default() -> None:
    """Two minutes without an answer, and six times that while it is at work."""
    spec = spec_with_health("vllm-tpu", {})
    assert spec.hang_timeout_s == limits.TPU_HANG_TIMEOUT_S == 120.0
    compiles = StepSigns(silent_s=719.0, busy_share=None, program="jit_step")
    assert is_at_work(compiles, spec.hang_timeout_s)
    assert not is_at_work(replace(compiles, silent_s=720.0), spec.hang_timeout_s)
    assert not is_at_work(replace(compiles, program=None), spec.hang_timeout_s)


def spec_with_health(kind: str, health: dict[str, Any]) -> EngineSpec:
    whole = {"generation": "v6e", "topology": "2x2", "chips_per_host": 4}
    where = {"slice": whole} if kind == "vllm-tpu" else {}
    model = {
        "name": "m",
        "source": "models/slicewise-demo",
        "engine": kind,
        "deployments": [
            {"compute_class": "reserved" if where else "local", "replicas": 1, **where}
        ],
    }
    config = check_app_config({"models": [model], "health": health}, None)
    return engine_spec(config, config.models[0], config.models[0].deployments[0])
