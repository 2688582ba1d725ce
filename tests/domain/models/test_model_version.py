"""What makes a version another one, and what does not."""

from typing import Any

import pytest

from serving.config.application import check_app_config
from serving.config.models import ModelConfig
from serving.domain.models.model_version import LIMIT_ARGS, digest_of, model_version

MODEL: dict[str, Any] = {
    "source": "models/demo",
    "engine": "vllm",
    "engine_args": {"max_model_len": 512, "max_num_seqs": 8, "dtype": "float32"},
    "engine_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "adapters": [("sql", "/adapters/sql")],
    "label": None,
}


def version(**changes: Any) -> str:
    return model_version(**(MODEL | changes))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"source": "models/other"}, id="weights"),
        pytest.param({"engine": "vllm-tpu"}, id="engine"),
        pytest.param({"engine_args": MODEL["engine_args"] | {"dtype": "bfloat16"}}, id="dtype"),
        pytest.param({"engine_args": MODEL["engine_args"] | {"max_model_len": 256}}, id="context"),
        pytest.param({"engine_args": MODEL["engine_args"] | {"unheard_of": 1}}, id="unknown"),
        pytest.param({"engine_env": {"VLLM_USE_SOMETHING": "1"}}, id="environment"),
        pytest.param({"adapters": []}, id="adapters"),
        pytest.param({"label": "v2"}, id="label"),
    ],
)
def test_what_may_change_tokens_makes_another_version(changes: dict[str, Any]) -> None:
    assert version(**changes) != version()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"engine_args": MODEL["engine_args"] | {"max_num_seqs": 64}}, id="batch"),
        pytest.param({"engine_args": dict(reversed(MODEL["engine_args"].items()))}, id="order"),
        pytest.param({"engine_env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, id="memory"),
        pytest.param({"engine_env": {}}, id="no memory"),
    ],
)
def test_limits_and_order_leave_the_version(changes: dict[str, Any]) -> None:
    assert version(**changes) == version()


def test_label_stands_in_front() -> None:
    label, _, digest = version(label="june").partition("-")
    assert (label, len(digest)) == ("june", 12)


def test_limits_are_arguments_of_the_installed_vllm() -> None:
    names = dict.fromkeys(LIMIT_ARGS, 1)
    problems = check_problems(engine_args=names)
    assert [each for each in problems if "unknown" in each or "no such" in each] == []


def check_problems(**changes: Any) -> list[str]:
    from serving.config.application import parse_app_config
    from serving.domain.errors import ConfigError

    model = {"name": "m", "source": "s", "deployments": [{"compute_class": "local"}]}
    try:
        parse_app_config({"models": [model | changes]})
    except ConfigError as error:
        return [str(each) for each in error.problems]
    return []


def test_pace_is_no_part_of_a_version_and_the_seed_is() -> None:
    def paced(**pace: Any) -> str:
        model = {
            "name": "m",
            "source": "s",
            "engine": "paced",
            "paced": pace,
            "deployments": ({"compute_class": "local"},),
        }
        return ModelConfig.model_validate(model).version_id

    assert paced(tpot_ms=1.0) == paced()
    assert paced(model_seed=7) != paced()


def test_version_of_the_configuration_survives_its_own_words() -> None:
    raw = {
        "models": [
            {
                "name": "m",
                "source": "s",
                "engine_args": {"max_model_len": 128, "dtype": "float32"},
                "deployments": [{"compute_class": "local"}],
            }
        ]
    }
    model = check_app_config(raw, None).models[0]
    again = ModelConfig.model_validate(model.model_dump(mode="json"))
    assert again == model
    assert again.version_id == model.version_id


def test_digest_refuses_what_is_no_json() -> None:
    with pytest.raises(TypeError):
        digest_of({"a": object()})
