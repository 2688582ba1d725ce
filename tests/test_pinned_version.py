"""Which change of the configuration replaces which replicas."""

from copy import deepcopy
from typing import Any

from ray import serve
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig

from serving.app import build
from serving.pinned_version import pin_version


class Nothing:
    """Deployed by nobody."""


def test_serves_own_version_does_not_replace_ours_and_the_rest_is_kept() -> None:
    options = {"num_replicas": 2, "user_config": {"a": 1}, "graceful_shutdown_timeout_s": 7.5}
    deployment = pin_version(serve.deployment(Nothing).options(name="n", **options), {"part": 1})
    # As Serve does it: copied on the way, given its own version, sent to the controller.
    copied = deepcopy(deployment._deployment_config)
    copied.version = "a digest of all arguments"
    arrived = DeploymentConfig.from_proto_bytes(copied.to_proto_bytes())
    assert arrived.version == deployment._deployment_config.version != copied.__class__.__name__
    assert arrived.version != "a digest of all arguments"
    assert (arrived.num_replicas, arrived.user_config) == (2, {"a": 1})
    assert arrived.graceful_shutdown_timeout_s == 7.5
    assert arrived.user_configured_option_names >= options.keys()


def model(name: str, seed: int = 0, replicas: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "source": "models/slicewise-demo",
        "engine": "paced",
        "paced": {"model_seed": seed},
        "deployments": [{"compute_class": "local", "replicas": replicas}],
    } | changes


def versions(*models: dict[str, Any], **sections: Any) -> dict[str, str | None]:
    """The version of each deployment, as it goes to Serve's controller."""
    built = build_app(build({"models": list(models), **sections}), name="slicewise")
    told = {}
    for deployment in built.deployments:
        config = deployment._deployment_config
        config.version = "a digest of all arguments"
        told[deployment.name] = config.version
    return told


def changed(before: dict[str, str | None], after: dict[str, str | None]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


BEFORE = (model("a"), model("b"))


def test_change_of_one_model_replaces_its_engines_alone() -> None:
    after = versions(model("a", seed=1), model("b"))
    assert changed(versions(*BEFORE), after) == {"engine-a-local"}


def test_numbers_of_replicas_and_frontends_replace_nothing() -> None:
    after = versions(
        model("a", replicas=3),
        model("b", frontend_args={"enable_auto_tool_choice": False}),
        gateway={"replicas": 2},
        rollout={"drain_s": 1.0},
    )
    assert changed(versions(*BEFORE), after) == set()


def test_number_of_gateways_that_follows_replaces_none_of_them() -> None:
    auto = versions(*BEFORE, gateway={"replicas": "auto"})
    assert changed(versions(*BEFORE), auto) == set()
    assert (
        changed(auto, versions(model("a", replicas=9), BEFORE[1], gateway={"replicas": "auto"}))
        == set()
    )
    told = {"replicas": "auto", "expected_tokens_per_s": 10, "expected_requests_per_s": 1}
    assert changed(auto, versions(*BEFORE, gateway=told)) == set()


def test_canary_replaces_nothing() -> None:
    canary = model("a-next", seed=1, canary_of="a", canary_weight=0.1)
    assert changed(versions(*BEFORE), versions(*BEFORE, canary)) == {"engine-a-next-local"}


def test_change_of_the_gateway_replaces_gateways_alone() -> None:
    after = versions(*BEFORE, gateway={"max_body_bytes": 2048})
    assert changed(versions(*BEFORE), after) == {"gateway"}


def test_port_of_the_exporters_replaces_the_dashboard_alone() -> None:
    before = versions(*BEFORE)
    after = versions(*BEFORE, gateway={"tpu_exporter_port": 8431})
    assert changed(before, after) == {"dashboard"}
