"""A serve_config.yaml is checked against the environment that Ray is started with."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli import build_cli
from serving.config.check import check_serve_config
from serving.config.ray_settings import HAPROXY, HARD_STOP, RAY_SETTINGS
from tests.e2e.several_models import write_adapter

ROOT = Path(__file__).parents[2]
ROLLOUT = "applications[0].args.rollout"


def settings_with(**rollout: float) -> Any:
    settings = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    settings["applications"][0]["args"]["rollout"] = rollout
    return settings


def problems_of(settings: Any, **inherited: str) -> list[str]:
    return [str(problem) for problem in check_serve_config(settings, None, inherited).problems]


def test_longest_drain_that_the_field_takes_is_within_our_hard_stop() -> None:
    longest = settings_with(gateway_drain_s=3600, drain_s=3600)
    assert problems_of(longest) == []
    assert int(RAY_SETTINGS[HARD_STOP]) >= 2 * 3600


@pytest.mark.parametrize(
    ("rollout", "stop_s", "problem"),
    [
        (
            {"gateway_drain_s": 600, "drain_s": 0},
            "120",
            f"{ROLLOUT}.gateway_drain_s: HAProxy cuts streams 120 s after the first change of "
            f"gateways (value 600); allowed: at most 0, which is {HARD_STOP} less 120",
        ),
        (
            {"gateway_drain_s": 10, "drain_s": 600.5},
            "720",
            f"{ROLLOUT}.drain_s: HAProxy cuts streams 720 s after the first change of gateways "
            f"(value 600.5); allowed: at most 600, which is {HARD_STOP} less 120",
        ),
        (
            {"gateway_drain_s": 10},
            "2h",
            f"{HARD_STOP}: Ray would not start (value '2h'); allowed: whole seconds",
        ),
    ],
)
def test_drain_beyond_the_hard_stop_of_the_environment_is_refused(
    rollout: dict[str, float], stop_s: str, problem: str
) -> None:
    assert problems_of(settings_with(**rollout), **{HARD_STOP: stop_s}) == [problem]


@pytest.mark.parametrize("inherited", [{HARD_STOP: "720"}, {HARD_STOP: "120", HAPROXY: "0"}])
def test_drain_within_the_hard_stop_or_without_haproxy_is_taken(inherited: dict[str, str]) -> None:
    assert problems_of(settings_with(gateway_drain_s=600), **inherited) == []


def test_config_check_reads_the_users_own_hard_stop(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(settings_with(gateway_drain_s=600)))
    result = CliRunner(env={HARD_STOP: "300"}).invoke(build_cli(()), ["config", "check", str(path)])
    assert result.exit_code == 1
    assert f"{ROLLOUT}.gateway_drain_s: HAProxy cuts streams 300 s after" in result.output


@pytest.mark.parametrize(
    ("gateway", "line"),
    [
        ({"replicas": 3}, "  gateway      replicas: 3\n"),
        (
            {"replicas": "auto", "expected_tokens_per_s": 512},
            "  gateway      replicas: 2 (auto: 512 tokens/s (expected) and 2 requests/s (answers "
            "of 256 tokens, assumed) need 0.02 cores; with one gateway away each of the others "
            "takes at most 0.7 of one)\n",
        ),
    ],
)
def test_config_check_says_how_many_gateways_and_why(
    tmp_path: Path, gateway: dict[str, Any], line: str
) -> None:
    settings = settings_with()
    settings["applications"][0]["args"]["gateway"] = gateway
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(build_cli(()), ["config", "check", str(path)])
    assert result.exit_code == 0, result.output
    assert line in result.output


def check_with_keys(tmp_path: Path, keys: str | None) -> Any:
    if keys is not None:
        (tmp_path / "keys").write_text(keys)
    settings = settings_with()
    settings["applications"][0]["args"]["auth"] = {"keys_file": str(tmp_path / "keys")}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(settings))
    return CliRunner().invoke(build_cli(()), ["config", "check", str(path)])


def test_config_check_reads_the_file_of_api_keys_where_it_is_on_this_machine(
    tmp_path: Path,
) -> None:
    result = check_with_keys(tmp_path, "keys:\n- {name: ci, key: secret, models: [demmo]}\n")
    assert result.exit_code == 1
    assert "auth.keys_file: the key 'ci' is for a model that is not served" in result.output
    assert '(value "demmo"); served: slicewise-demo' in result.output
    result = check_with_keys(tmp_path, "keys:\n- {name: ci, key: secret, routes: [/v3]}\n")
    assert result.exit_code == 1
    assert "keys[0].routes[0]: not allowed" in result.output
    assert "secret" not in result.output


@pytest.mark.parametrize(
    "keys", [None, "team secret\n", "keys:\n- {name: ci, key: secret, models: [slicewise-demo]}\n"]
)
def test_config_check_takes_a_sound_file_of_keys_and_one_that_is_elsewhere(
    keys: str | None, tmp_path: Path
) -> None:
    result = check_with_keys(tmp_path, keys)
    assert result.exit_code == 0, result.output


def test_config_check_reads_the_folders_of_adapters_where_they_are_on_this_machine(
    tmp_path: Path,
) -> None:
    settings = settings_with()
    model = settings["applications"][0]["args"]["models"][0]
    model["engine_args"] |= {"enable_lora": True, "max_lora_rank": 8}
    folders = {"wide": write_adapter(tmp_path / "wide", rank=32), "there": Path("/nowhere/at/all")}
    model["lora_adapters"] = [{"name": key, "path": str(at)} for key, at in folders.items()]
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(build_cli(()), ["config", "check", str(path)])
    assert result.exit_code == 1
    assert "models[0].lora_adapters[0].path: its rank is 32" in result.output
    assert "allowed: at most max_lora_rank, which is 8" in result.output
    assert "lora_adapters[1]" not in result.output


SEEING = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}
MEDIA_MISSING = "models[0].engine_args.allowed_media_domains: missing, and the model takes images"


def check_model(tmp_path: Path, config: str | None, **engine_args: Any) -> Any:
    """`config check` of an application whose model has this `config.json`."""
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(config)
    settings = settings_with()
    (model,) = settings["applications"][0]["args"]["models"]
    model["source"] = str(tmp_path / "model")
    model["engine_args"] |= engine_args
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(settings))
    return CliRunner().invoke(build_cli(()), ["config", "check", str(path)])


@pytest.mark.parametrize(
    "config",
    [
        SEEING,
        {"architectures": ["Blip2ForConditionalGeneration"]},  # by vLLM's registry alone
        {"architectures": ["Ours"], "audio_config": {}},
    ],
)
def test_config_check_refuses_a_model_that_would_fetch_any_url(
    config: dict[str, Any], tmp_path: Path
) -> None:
    result = check_model(tmp_path, json.dumps(config))
    assert result.exit_code == 1
    assert MEDIA_MISSING in result.output
    assert "needed: a list of host names, such as [images.example.com]; [] lets" in result.output


@pytest.mark.parametrize(
    "engine_args",
    [
        {"allowed_media_domains": []},
        {"allowed_media_domains": ["images.example.com", "10.0.0.7"]},
        {"language_model_only": True},
    ],
)
def test_config_check_takes_a_model_that_fetches_from_named_hosts_or_not_at_all(
    engine_args: dict[str, Any], tmp_path: Path
) -> None:
    result = check_model(tmp_path, json.dumps(SEEING), **engine_args)
    assert result.exit_code == 0, result.output


def test_config_check_takes_a_model_that_it_knows_nothing_of(tmp_path: Path) -> None:
    assert check_model(tmp_path, None).exit_code == 0


def test_config_check_says_that_a_models_configuration_is_unreadable(tmp_path: Path) -> None:
    result = check_model(tmp_path, "{")
    assert result.exit_code == 1
    assert "models[0].source:" in result.output
    assert "not readable as JSON" in result.output


def check_defaults(tmp_path: Path, engine: str, **engine_args: Any) -> Any:
    """`config check` of a model whose authors ask for a penalty."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    settings = {"repetition_penalty": 1.05, "temperature": 0.6, "min_p": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    serve = settings_with()
    application = serve["applications"][0]["args"]
    (model,) = application["models"]
    kept = {"source": str(folder), "engine": engine, "engine_args": engine_args}
    if engine == "vllm-tpu":
        slice_kind = {"generation": "v6e", "topology": "2x2"}
        kept |= {"deployments": [{"compute_class": "spot", "slice": slice_kind}]}
        application["compute_classes"] = [{"name": "spot", "market": "spot"}]
    model.update(kept)
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(serve))
    return CliRunner().invoke(build_cli(()), ["config", "check", str(path)])


@pytest.mark.parametrize(
    ("engine", "engine_args", "told"),
    [
        ("vllm-tpu", {}, ["repetition_penalty 1.05"]),
        (
            "vllm-tpu",
            {"override_generation_config": {"min_p": 0.1}},
            ["repetition_penalty 1.05", "min_p 0.1"],
        ),
        ("vllm-tpu", {"generation_config": "vllm"}, []),
        ("vllm-tpu", {"override_generation_config": {"repetition_penalty": 1.0}}, []),
        ("vllm", {}, []),
    ],
)
def test_config_check_notes_defaults_that_engines_do_not_honour(
    tmp_path: Path, engine: str, engine_args: dict[str, Any], told: list[str]
) -> None:
    result = check_defaults(tmp_path, engine, **engine_args)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.output.splitlines() if "by default" in line]
    assert len(notes) == len(told)
    for note in told:
        assert f"has {note} by default; engines on TPU ignore it" in result.output


@pytest.mark.parametrize(
    ("own", "planned", "is_refused"),
    [
        (None, {"ttft_s": 3.0, "tpot_s": 0.1}, False),
        (None, {"ttft_s": 3.0, "tpot_s": 0.1, "ttft_per_prompt_token_s": 1e-4}, True),
        ({"ttft_s": 3.0, "tpot_s": 0.1}, {"ttft_s": 3.0, "tpot_s": 0.1}, False),
        ({"ttft_s": 2.0, "tpot_s": 0.1}, {"ttft_s": 3.0, "tpot_s": 0.1}, True),
        ({"ttft_s": 2.0, "tpot_s": 0.1}, {}, False),
    ],
)
def test_objectives_of_a_model_are_those_that_its_policy_plans_for(
    own: dict[str, float] | None, planned: dict[str, float], *, is_refused: bool
) -> None:
    settings = settings_with()
    (application,) = settings["applications"]
    (model,) = application["args"]["models"]
    if own is not None:
        model["objectives"] = own
    models = {model["name"]: {"objectives": planned}}
    application["autoscaling_policy"] = {"policy_kwargs": {"models": models}}
    place = "applications[0].args.models[0].objectives: not those that the policy plans for"
    assert [place in problem for problem in problems_of(settings)].count(True) == is_refused


def with_policy(**changes: Any) -> Any:
    settings = yaml.safe_load((ROOT / "deployments/sim/autoscaling.yaml").read_text())
    settings["applications"][0]["autoscaling_policy"] |= changes
    return settings


def test_settings_of_our_policy_are_read_before_anything_is_deployed() -> None:
    kwargs = with_policy()["applications"][0]["autoscaling_policy"]["policy_kwargs"]
    (model,) = kwargs["models"]

    def with_rules(**rules: object) -> list[str]:
        changed = copy.deepcopy(kwargs)
        changed["models"][model].setdefault("rules", {}).update(rules)
        return problems_of(with_policy(policy_kwargs=changed))

    assert problems_of(with_policy()) == []
    place = "applications[0].autoscaling_policy.policy_kwargs: "
    too_much, unknown = sorted(with_rules(nonsense=1, late_ratio=7.0))
    assert unknown.startswith(f"{place}models.{model}.rules.nonsense is 1: ")
    assert too_much.startswith(f"{place}models.{model}.rules.late_ratio is 7.0: ")
    lost = problems_of(with_policy(policy_kwargs=kwargs | {"prices": "nowhere.yaml"}))
    assert [each.startswith(f"{place}prices: ") for each in lost] == [True]


def test_example_of_the_guide_can_be_deployed_as_it_stands() -> None:
    guide = (ROOT / "docs/guide/autoscaling.md").read_text()
    (example,) = re.findall(r"```yaml\n(- name: .*?)```", guide, re.DOTALL)

    here = {"http_options": {"host": "127.0.0.1"}}
    assert problems_of({**here, "applications": yaml.safe_load(example)}) == []


@pytest.mark.parametrize("function", ["autoscaling.serve_polcy:SlicePolicy", "autoscaling:Slices"])
def test_policy_of_ours_that_is_not_there_is_named(function: str) -> None:
    (problem,) = problems_of(with_policy(policy_function=function))

    place = "applications[0].autoscaling_policy.policy_function: cannot be imported: "
    assert problem.startswith(place)
    assert f"(value {function}); needed: autoscaling.serve_policy:SlicePolicy" in problem


def test_policy_of_somebody_else_is_not_imported() -> None:
    assert problems_of(with_policy(policy_function="theirs.policy:scale", policy_kwargs={})) == []


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({}, ""),
        ({"min_slices": 4, "max_slices": 2}, ""),
        ({"min_slices": 5}, "max_replicas: fewer than the slices that the policy keeps at least"),
        ({"max_slices": 1}, "min_replicas: more than the slices that the policy has at most"),
        ({"min_slices": "five"}, ""),
    ],
)
def test_bounds_of_a_class_and_those_of_its_deployment_meet(
    bounds: dict[str, Any], complaint: str
) -> None:
    settings = settings_with()
    (application,) = settings["applications"]
    (model,) = application["args"]["models"]
    model["deployments"] = [{"compute_class": "spot", "min_replicas": 2, "max_replicas": 4}]
    models = {model["name"]: {"classes": {"spot": bounds}}}
    application["autoscaling_policy"] = {"policy_kwargs": {"models": models}}

    place = "applications[0].args.models[0].deployments[0]."
    found = [each for each in problems_of(settings) if "that the policy" in each]
    assert len(found) == bool(complaint)
    assert all(f"{place}{complaint}" in each for each in found)


@pytest.mark.parametrize(
    ("classes", "complaint"),
    [
        ({}, ""),
        ({"spot": {"profile": {"topology": "2x2"}}}, ""),
        ({"spot": {"profile": {"topology": "2x4"}}}, "for spot is of, v6e 2x4"),
        ({"spot": {"profile": {"num_slices": 2}}}, "for spot is of, v6e 2x2 x 2"),
        ({"spot": {"profile": {"topology": None}}}, ""),
    ],
)
def test_slices_are_those_that_their_policy_plans_with(
    classes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    profile = {
        "model": "m",
        "engine": "paced",
        "generation": "v6e",
        "topology": "2x2",
        "base_s": 0.02,
        "per_sequence_s": 0.001,
        "per_prompt_token_s": 0.0,
        "max_num_seqs": 64,
        "measured_on": "2026-11-28",
        "source": "made up",
    }
    classes = {name: {"profile": profile | each["profile"]} for name, each in classes.items()}
    settings = settings_with()
    (application,) = settings["applications"]
    (model,) = application["args"]["models"]
    its_slice = {"generation": "v6e", "topology": "2x2"}
    model["deployments"] = [{"compute_class": "spot", "slice": its_slice}]
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(profile))
    for of_model in (profile, str(path), "nowhere.yaml"):
        planned = {model["name"]: {"profile": of_model, "classes": classes}}
        application["autoscaling_policy"] = {"policy_kwargs": {"models": planned}}
        found = [each for each in problems_of(settings) if "deployments[0].slice" in each]
        assert len(found) == bool(complaint)
        assert complaint in "".join(found)
