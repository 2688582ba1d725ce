"""The configuration: what is accepted and refused, and that all problems are listed at once."""

import copy
import datetime
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.config.application import (
    CONTROL_CPUS,
    AppConfig,
    AuthConfig,
    LinkConfig,
    check_app_config,
    exposure_problem,
    parse_app_config,
)
from serving.config.schema import shown
from serving.config.vllm.vllm_args import ArgSpec, VllmArgs
from serving.domain.capacity.gateway_sizing import GatewayCount
from serving.domain.errors import ConfigError, Problem
from serving.domain.models.engine_kind import EngineKind

AN_INTEGER = ArgSpec(frozenset({"an integer"}))
A_STRING = ArgSpec(frozenset({"a string"}))
A_BOOLEAN = ArgSpec(frozenset({"true or false"}))
VLLM_ARGS = VllmArgs(
    engine={
        "model": A_STRING,
        "max_model_len": AN_INTEGER,
        "max_num_seqs": AN_INTEGER,
        "dtype": ArgSpec(choices=("auto", "bfloat16")),
        "enable_lora": A_BOOLEAN,
        "reasoning_parser": A_STRING,
        "reasoning_parser_plugin": A_STRING,
        "structured_outputs_config": ArgSpec(),
        "additional_config": ArgSpec(frozenset({"a mapping"})),
        "hf_token": A_STRING,
    },
    frontend={
        "tool_call_parser": A_STRING,
        "enable_auto_tool_choice": A_BOOLEAN,
        "tool_parser_plugin": A_STRING,
        "chat_template": A_STRING,
    },
    server={"port": AN_INTEGER, "grpc_port": AN_INTEGER},
    parsers={"tool_call_parser": ("hermes", "mistral"), "reasoning_parser": ("qwen3",)},
)


def minimal(**model: Any) -> dict[str, Any]:
    """A configuration of one model, with these fields of it set."""
    base = {"name": "demo", "source": "models/demo", "deployments": [{"compute_class": "local"}]}
    return {"models": [base | model]}


def check(raw: object) -> AppConfig:
    return check_app_config(raw, VLLM_ARGS)


def problems(raw: object, vllm_args: VllmArgs | None = VLLM_ARGS) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_app_config(raw, vllm_args)
    return [str(problem) for problem in caught.value.problems]


def test_minimal_config_gets_the_documented_defaults() -> None:
    config = check(minimal())
    model = config.models[0]
    assert model.engine is EngineKind.VLLM
    assert model.name == "demo"
    assert (model.deployments[0].replicas, model.deployments[0].num_cpus) == (1, 0.1)
    assert config.gateway.max_body_bytes == 16 * 1024 * 1024
    assert config.gateway.request_deadline_s == 60.0
    assert config.gateway.max_engine_losses == 3
    assert config.gateway.max_ongoing_requests == 4096
    assert (config.link.heartbeat_interval_s, config.link.heartbeat_timeout_s) == (0.25, 1.0)
    assert (config.health.check_period_s, config.health.hang_timeout_s) == (1.0, None)
    assert not config.auth.has_keys


def test_full_config_is_taken_as_written() -> None:
    raw = minimal(
        engine="vllm",
        engine_args={
            "max_model_len": 2048,
            "dtype": "bfloat16",
            "enable_lora": True,
            "reasoning_parser": "qwen3",
            "additional_config": {"sharding": {"axes": [1, 2, None]}},
        },
        engine_env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        frontend_args={"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
        lora_adapters=[{"name": "sql", "path": "adapters/sql"}],
        deployments=[
            {"compute_class": "v6e-spot", "replicas": 5, "num_cpus": 1},
            {"compute_class": "v6e-reserved", "replicas": 2, "num_cpus": 0.5},
        ],
    ) | {"gateway": {"replicas": 3, "num_cpus": 2}, "auth": {"keys_env": "KEYS"}}
    config = check(raw)
    model = config.models[0]
    assert model.engine_args == raw["models"][0]["engine_args"]
    assert model.frontend_args == raw["models"][0]["frontend_args"]
    assert model.engine_env == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert [adapter.name for adapter in model.lora_adapters] == ["sql"]
    assert [model.deployment_name(entry) for entry in model.deployments] == [
        "engine-demo-v6e-spot",
        "engine-demo-v6e-reserved",
    ]
    # With one control process for each engine, the directory and the dashboard.
    assert config.num_cpus == pytest.approx(5 * 1 + 2 * 0.5 + 3 * 2 + (5 + 2 + 2) * CONTROL_CPUS)
    assert config.auth.has_keys


def test_paced_engine_has_a_frontend_that_reads_thoughts() -> None:
    args = {"reasoning_parser": "qwen3"}
    assert check(minimal(engine="paced", engine_args=args)).models[0].engine_args == args


def test_paced_engine_takes_its_pace_in_milliseconds() -> None:
    pace = {"ttft_ms": 5, "tpot_ms": 0.5, "tpot_per_seq_ms": 0.25, "max_num_seqs": 8}
    assert check(minimal(engine="paced", paced=pace)).models[0].paced_options() == {
        "ttft_s": 0.005,
        "time_per_token_s": 0.0005,
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "prefill_tokens_per_s": None,
        "tpot_per_seq_s": 0.00025,
        "max_num_batched_tokens": 8192,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "kv_cache_tokens": None,
        "block_size": 16,
        "load_s": 0.0,
        "compile_s": 0.0,
        "model_seed": 0,
    }
    assert check(minimal(engine="paced")).models[0].paced_options()["ttft_s"] == 0.02


def gateways_of(deployments: list[dict[str, Any]], **model: Any) -> GatewayCount:
    raw = minimal(deployments=deployments, **model) | {"gateway": {"replicas": "auto"}}
    return check(raw).gateway_count


def test_number_of_gateways_is_the_one_given_or_follows_from_the_most_engines() -> None:
    assert check(minimal()).gateway_count.number == 1
    assert check(minimal() | {"gateway": {"replicas": 7}}).gateway_count.number == 7
    scaling = {"compute_class": "spot", "min_replicas": 0, "max_replicas": 6}
    fixed = {"compute_class": "reserved", "replicas": 2}
    count = gateways_of([scaling, fixed], engine_args={"max_num_seqs": 256})
    assert count.number == 4
    assert count.reason == (
        "40,960 tokens/s (2,048 sequences on 8 engines of demo at 20 each, assumed) and "
        "160 requests/s (answers of 256 tokens, assumed) need 1.71 cores; "
        "each gateway takes at most 0.5 of one"
    )
    # With 1 CPU each, and control processes for eight engines, directory and dashboard.
    raw = minimal(deployments=[scaling, fixed], engine_args={"max_num_seqs": 256})
    config = check(raw | {"gateway": {"replicas": "auto", "num_cpus": 1}})
    assert config.num_cpus == pytest.approx(8 * 0.1 + 4 * 1 + 10 * CONTROL_CPUS)


def test_sequences_of_an_engine_are_those_that_it_takes() -> None:
    one = [{"compute_class": "local"}]
    assert "128 sequences on 1 engine" in gateways_of(one).reason
    assert "64 sequences on 1 engine" in gateways_of(one, engine_args={"max_num_seqs": 64}).reason
    pace = {"tpot_ms": 20, "tpot_per_seq_ms": 5, "max_num_seqs": 16}
    paced = gateways_of(one, engine="paced", paced=pace).reason
    assert paced.startswith("160 tokens/s (16 sequences on 1 engine of demo at 10 each, the pace")
    # Without a pace of its own.
    endless = gateways_of(one, engine="paced", paced={"tpot_ms": 0}).reason
    assert "256 sequences on 1 engine of demo at 20 each, assumed" in endless
    joined = {"generation": "v6e", "topology": "2x4", "num_slices": 2}
    on_slices = [{"compute_class": "spot", "replicas": 3, "slice": joined}]
    assert "1,536 sequences on 3 engines" in gateways_of(on_slices, engine="vllm-tpu").reason


def test_paced_step_too_small_for_its_requests_is_refused() -> None:
    pace = {"prefill_tokens_per_s": 8000.0, "max_num_batched_tokens": 64}
    with pytest.raises(ConfigError) as refused:
        check(minimal(engine="paced", paced=pace))
    assert (
        "models[0].paced.max_num_batched_tokens: too few, with models[0].paced."
        "prefill_tokens_per_s, for a token of every request (value 64); "
        "allowed: at least 256, models[0].paced.max_num_seqs"
    ) in str(refused.value)
    check(minimal(engine="paced", paced={"max_num_batched_tokens": 64}))


def test_bound_on_a_prompts_part_of_a_step_is_no_more_than_a_prompt_has() -> None:
    pace = {"prefill_tokens_per_s": 8000.0, "max_model_len": 512}
    with pytest.raises(ConfigError) as refused:
        check(minimal(engine="paced", paced={**pace, "long_prefill_token_threshold": 513}))
    assert (
        "models[0].paced.long_prefill_token_threshold: more than a prompt has (value 513); "
        "allowed: up to 512, models[0].paced.max_model_len; 0 bounds nothing"
    ) in str(refused.value)
    check(minimal(engine="paced", paced={**pace, "long_prefill_token_threshold": 512}))


@pytest.mark.parametrize(
    ("pace", "problem"),
    [
        ({}, "prompts take no time, so there is nothing to find; allowed: with models[0].paced."),
        (
            {"prefill_tokens_per_s": 8000.0, "block_size": 48},
            "a request of models[0].paced.max_model_len has no room in whole blocks of 48 "
            "(value 2048); allowed: at least 2064",
        ),
    ],
)
def test_paced_cache_that_finds_nothing_or_is_too_small_is_refused(
    pace: dict[str, float], problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(minimal(engine="paced", paced={"kv_cache_tokens": 2048, **pace}))
    assert f"models[0].paced.kv_cache_tokens: {problem}" in str(refused.value)
    options = {"kv_cache_tokens": 2048, "prefill_tokens_per_s": 8000.0}
    assert (
        check(minimal(engine="paced", paced=options)).models[0].paced_options()["kv_cache_tokens"]
        == 2048
    )


def test_config_is_frozen_and_survives_pickling() -> None:
    config = check(minimal())
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.gateway.replicas = 2  # type: ignore[misc]


def test_parsing_leaves_the_raw_config_alone() -> None:
    raw = minimal(engine_args={"max_model_len": 1})
    before = copy.deepcopy(raw)
    check(raw)
    assert raw == before


# What is set on the one model, and the problem it makes.
BAD_MODELS: list[tuple[dict[str, Any], str]] = [
    (
        {"engine_args": {"max_model_length": 2048}},
        "models[0].engine_args.max_model_length: unknown key (value 2048); "
        "did you mean 'max_model_len'?",
    ),
    (
        {"engine_args": {"max-model-len": 2048}},
        "models[0].engine_args.max-model-len: unknown key (value 2048); "
        "did you mean 'max_model_len'?",
    ),
    (
        {"engine_args": {"max_model_len": "2048"}},
        'models[0].engine_args.max_model_len: not allowed (value "2048"); allowed: an integer',
    ),
    (
        {"engine_args": {"dtype": "bf16"}},
        'models[0].engine_args.dtype: not allowed (value "bf16"); allowed: one of auto, bfloat16',
    ),
    (
        {"engine_args": {"model": "x"}},
        'models[0].engine_args.model: set by Slicewise (value "x"); from `source`',
    ),
    (
        {"engine_args": {"data_parallel_size": 2}},
        "models[0].engine_args.data_parallel_size: set by Slicewise (value 2); for more engines "
        "raise `replicas`, or `num_engines` of the slice, which they then share; "
        "`data_parallel_size` is open for vllm-tpu",
    ),
    (
        {"engine_args": {"hf_token": "hf_abc"}},
        "models[0].engine_args.hf_token: refused (value <hidden>); put HF_TOKEN into the "
        "environment of the hosts: Ray's dashboard shows this file",
    ),
    (
        {"engine_args": {"chat_template": "x"}},
        'models[0].engine_args.chat_template: unknown key (value "x"); allowed: in frontend_args',
    ),
    (
        {"engine_args": {"reasoning_parser": "qwen2"}},
        'models[0].engine_args.reasoning_parser: unknown parser (value "qwen2"); '
        "did you mean 'qwen3'?",
    ),
    (
        {"engine_args": {"additional_config": {"day": datetime.date(2026, 1, 1)}}},
        'models[0].engine_args.additional_config.day: not allowed (value "2026-01-01"); '
        "allowed: a JSON value",
    ),
    (
        {"engine_args": {1: 2}},
        "models[0].engine_args[1]: not allowed as a name; allowed: a string",
    ),
    (
        {"engine_args": None},
        "models[0].engine_args: not allowed (value null); allowed: a mapping",
    ),
    (
        {"frontend_args": {"reasoning_parser": "qwen3"}},
        'models[0].frontend_args.reasoning_parser: unknown key (value "qwen3"); '
        "allowed: in engine_args",
    ),
    (
        {"frontend_args": {"grpc_port": 1}},
        "models[0].frontend_args.grpc_port: refused (value 1); the gateway and the Serve proxy are "
        "the server; see http_options",
    ),
    (
        {"frontend_args": {"ssl_keyfile": "k"}},
        'models[0].frontend_args.ssl_keyfile: refused (value "k"); the gateway and the Serve proxy '
        "are the server; see http_options",
    ),
    (
        {"frontend_args": {"enable_log_outputs": True}},
        "models[0].frontend_args.enable_log_outputs: set by Slicewise (value true); Slicewise logs "
        "neither prompts nor generated text",
    ),
    (
        {"frontend_args": {"api_key": "abc"}},
        "models[0].frontend_args.api_key: refused (value <hidden>); use auth.keys_file or "
        "auth.keys_env",
    ),
    (
        {"frontend_args": {"tool_call_parser": "hermes"}},
        "models[0].frontend_args.tool_call_parser: without automatic tool choice it is never used "
        '(value "hermes"); allowed: only with enable_auto_tool_choice: true',
    ),
    (
        {"frontend_args": {"enable_auto_tool_choice": True}},
        "models[0].frontend_args.tool_call_parser: missing; required by "
        "enable_auto_tool_choice: true",
    ),
    (
        {"frontend_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermse"}},
        'models[0].frontend_args.tool_call_parser: unknown parser (value "hermse"); '
        "did you mean 'hermes'?",
    ),
    (
        {
            "engine_args": {
                "reasoning_parser": "qwen3",
                "structured_outputs_config": {"backend": "xgrammar"},
            }
        },
        "models[0].engine_args.reasoning_parser: structured_outputs_config is given as well "
        '(value "qwen3"); allowed: reasoning_parser within structured_outputs_config',
    ),
    (
        {"lora_adapters": [{"name": "sql", "path": "a"}]},
        "models[0].engine_args.enable_lora: models[0].lora_adapters needs it; "
        "allowed: true, or no lora_adapters",
    ),
    (
        {
            "engine_args": {"enable_lora": False},
            "lora_adapters": [{"name": "sql", "path": "a"}],
        },
        "models[0].engine_args.enable_lora: models[0].lora_adapters needs it (value false); "
        "allowed: true, or no lora_adapters",
    ),
    (
        {
            "engine_args": {"enable_lora": True},
            "lora_adapters": [{"name": "demo", "path": "a"}],
        },
        'models[0].lora_adapters[0].name: already the name at models[0].name (value "demo"); '
        "allowed: a name that no other model or adapter has",
    ),
    (
        {"engine": "paced", "engine_args": {"max_model_len": 1}},
        "models[0].engine_args: engine paced has none; allowed: reasoning_parser and "
        "reasoning_parser_plugin, which are its frontend's, or engine vllm",
    ),
    (
        {"engine": "paced", "lora_adapters": [{"name": "sql", "path": "a"}]},
        "models[0].lora_adapters: engine paced has none; allowed: leave it out, or engine vllm",
    ),
    (
        {"paced": {}},
        "models[0].paced: engine vllm has no pace; allowed: only with engine paced",
    ),
    (
        {"engine": "paced", "paced": {"ttft": 1}},
        "models[0].paced.ttft: unknown key (value 1); did you mean 'ttft_ms'?",
    ),
    (
        {"engine": "paced", "paced": {"ttft_ms": -1}},
        "models[0].paced.ttft_ms: not allowed (value -1); allowed: a number, 0 to 600000",
    ),
    (
        {"engine": "tgi"},
        'models[0].engine: not allowed (value "tgi"); allowed: one of vllm, vllm-tpu, paced',
    ),
    (
        {"name": "a b"},
        'models[0].name: not allowed (value "a b"); allowed: a string, letters, digits and '
        "`._:/@+-`, up to 200 characters",
    ),
    ({"source": ""}, 'models[0].source: not allowed (value ""); allowed: a string, not empty'),
    (
        {"engine_env": {"A-B": "1"}},
        "models[0].engine_env.A-B: not allowed as a name; allowed: strings; names of letters, "
        "digits and `_`, not starting with a digit",
    ),
    (
        {"engine_env": {"A": 1}},
        "models[0].engine_env.A: not allowed (value 1); allowed: a string",
    ),
    (
        {"deployments": []},
        "models[0].deployments: not allowed (value a list); "
        "allowed: a list of mappings, at least 1",
    ),
    (
        {"deployments": [{"compute_class": "V6E"}]},
        'models[0].deployments[0].compute_class: not allowed (value "V6E"); allowed: a string, a '
        "DNS-1123 label: lower-case letters, digits and inner `-`, up to 63 characters",
    ),
    (
        {"deployments": [{"compute_class": "a"}, {"compute_class": "a"}]},
        "models[0].deployments[1].compute_class: the deployment 'engine-demo-a' is already the one "
        "at models[0].deployments[0].compute_class; allowed: a compute class once per model, and "
        "no two deployments of one name",
    ),
    (
        {"deployments": [{"compute_class": "a", "replicas": "3"}]},
        'models[0].deployments[0].replicas: not allowed (value "3"); '
        "allowed: an integer, 0 to 4096",
    ),
    (
        {"deployments": [{"compute_class": "a", "replicas": True}]},
        "models[0].deployments[0].replicas: not allowed (value true); "
        "allowed: an integer, 0 to 4096",
    ),
    (
        {"deployments": [{"replicas": 1}]},
        "models[0].deployments[0].compute_class: missing; required: a string, a DNS-1123 label: "
        "lower-case letters, digits and inner `-`, up to 63 characters",
    ),
]


@pytest.mark.parametrize(("model", "problem"), BAD_MODELS, ids=lambda value: str(value)[:60])
def test_bad_model_is_refused_with_path_value_and_allowed(
    model: dict[str, Any], problem: str
) -> None:
    assert problems(minimal(**model)) == [problem]


# A section, its content, and the problem it makes.
BAD_SECTIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "gateway",
        {"replicas": 0},
        "gateway.replicas: not allowed (value 0); allowed: an integer or `auto`, 1 to 1024",
    ),
    (
        "gateway",
        {"replicas": "automatic"},
        'gateway.replicas: not allowed (value "automatic"); '
        "allowed: an integer or `auto`, 1 to 1024",
    ),
    (
        "gateway",
        {"replicas": "auto", "expected_tokens_per_s": -1},
        "gateway.expected_tokens_per_s: not allowed (value -1); "
        "allowed: a number or null, 0 to 1000000000000.0",
    ),
    (
        "gateway",
        {"replicas": 2, "expected_requests_per_s": 10},
        "gateway.expected_requests_per_s: nobody reads it where gateway.replicas is a number "
        "(value 10); allowed: only with gateway.replicas: auto",
    ),
    (
        "gateway",
        {"replicas": "auto", "expected_tokens_per_s": 1e8, "expected_requests_per_s": 0},
        "gateway.replicas: 6,250 gateways are more than there may be: 100,000,000 tokens/s "
        "(expected) and 0 requests/s (expected) need 3000.00 cores; each gateway takes at most 0.5 "
        'of one (value "auto"); allowed: an integer up to 1024, or the rates that you expect',
    ),
    (
        "gateway",
        {"request_deadline_s": float("inf")},
        "gateway.request_deadline_s: not allowed (value Infinity); "
        "allowed: a number, more than 0, at most 86400",
    ),
    (
        "gateway",
        {"max_body_byte": 1},
        "gateway.max_body_byte: unknown key (value 1); did you mean 'max_body_bytes'?",
    ),
    (
        "gateway",
        {"max_waiting_requests": 10, "max_ongoing_requests": 9},
        "gateway.max_waiting_requests: more than the requests a gateway holds at all (value 10); "
        "allowed: at most gateway.max_ongoing_requests, 9",
    ),
    (
        "gateway",
        {"max_body_bytes": 2048, "body_budget_bytes": 2047},
        "gateway.body_budget_bytes: no room for one body of the length allowed (value 2047); "
        "allowed: at least gateway.max_body_bytes, 2048",
    ),
    (
        "gateway",
        {"unread_budget_bytes": 8 * 2**20 - 1},
        "gateway.unread_budget_bytes: no room for one answer of the length allowed "
        "(value 8388607); allowed: at least gateway.max_unread_bytes, 8388608",
    ),
    (
        "gateway",
        {"min_hold_s": 0.2},
        "gateway.min_hold_s: longer than tokens may wait at all (value 0.2); "
        "allowed: at most gateway.max_hold_s, 0.1",
    ),
    (
        "batches",
        {"folder": "batches", "batches_at_once": 9},
        "batches.lines_in_flight: with 9 batches at once more than half of what may wait "
        "(value 64); allowed: so many that all batches have at most half of "
        "gateway.max_waiting_requests, 1024",
    ),
    (
        "batches",
        {"store": "s3://b", "batches_at_once": 9},
        "batches.lines_in_flight: with 9 batches at once more than half of what may wait "
        "(value 64); allowed: so many that all batches have at most half of "
        "gateway.max_waiting_requests, 1024",
    ),
    (
        "batches",
        {"store": "/var/lib/batches"},
        'batches.store: no address of a bucket (value "/var/lib/batches"); '
        "allowed: gs://BUCKET/... or s3://BUCKET/...",
    ),
    (
        "batches",
        {"store": "gs://b", "folder": "/var/lib/batches"},
        "batches.folder: batches are kept in batches.store already; allowed: one of the two",
    ),
    (
        "batches",
        {"store": "gs://b", "lease_s": 10},
        "batches.lease_s: too short for a bucket, which bears few writes (value 10); "
        "allowed: at least 20 with batches.store",
    ),
    (
        "batches",
        {"max_tenant_bytes": 1_000_000},
        "batches.max_tenant_bytes: no room for one file of the length allowed (value 1000000); "
        "allowed: at least batches.max_file_bytes, 209715200",
    ),
    (
        "batches",
        {"completion_windows": ["1d"]},
        'batches.completion_windows[0]: not allowed (value "1d"); allowed: a string, minutes or '
        "hours such as `30m` or `24h`",
    ),
    (
        "auth",
        {"keys_file": "keys.txt", "keys_env": "KEYS"},
        'auth.keys_env: auth.keys_file is given as well (value "KEYS"); '
        "allowed: keys_file or keys_env, not both",
    ),
    (
        "auth",
        {"keys_env": "MY KEYS"},
        'auth.keys_env: not allowed (value "MY KEYS"); allowed: a string or null, letters, digits '
        "and `_`, not starting with a digit",
    ),
    (
        "link",
        {"secret_file": "a", "secret_env": "B"},
        'link.secret_env: link.secret_file is given as well (value "B"); '
        "allowed: secret_file or secret_env, not both",
    ),
    (
        "link",
        {"heartbeat_interval_s": 0.5},
        "link.heartbeat_timeout_s: one late heartbeat would cut the link (value 1); "
        "allowed: more than 1, twice link.heartbeat_interval_s",
    ),
    (
        "link",
        {"gateway_timeout_s": 0.5},
        "link.gateway_timeout_s: one late heartbeat would cut the link (value 0.5); "
        "allowed: more than 0.5, twice link.heartbeat_interval_s",
    ),
    (
        "health",
        {"check_period_s": 4.0},
        "health.hang_timeout_s: not longer than the time between two checks (value 4); "
        "allowed: more than 4, health.check_period_s",
    ),
    ("gatway", {}, "gatway: unknown key (value a mapping); did you mean 'gateway'?"),
]


@pytest.mark.parametrize(("section", "content", "problem"), BAD_SECTIONS)
def test_bad_section_is_refused_with_path_value_and_allowed(
    section: str, content: dict[str, Any], problem: str
) -> None:
    assert problems(minimal() | {section: content}) == [problem]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([], "args: not allowed (value a list); allowed: a mapping"),
        (None, "args: not allowed (value null); allowed: a mapping"),
        ({}, "models: missing; required: a list of mappings, at least 1"),
        (
            {"models": []},
            "models: not allowed (value a list); allowed: a list of mappings, at least 1",
        ),
        ({"models": [7]}, "models[0]: not allowed (value 7); allowed: a mapping"),
    ],
)
def test_config_of_the_wrong_shape_is_refused(raw: object, problem: str) -> None:
    assert problems(raw) == [problem]


def test_every_problem_is_listed_at_once() -> None:
    raw = minimal(
        engine_args={"max_model_length": 1, "model": "x"},
        lora_adapters=[{"name": "demo", "path": ""}],
        deployments=[{"compute_class": "a", "replicas": 0}, {"compute_class": "a"}],
    ) | {"gateway": {"replicas": 0, "max_waiting_requests": 5000}, "auth": {"key_file": "x"}}
    paths = [line.split(": ")[0] for line in problems(raw)]
    assert sorted(paths) == sorted(
        [
            "models[0].engine_args.max_model_length",
            "models[0].engine_args.model",
            "models[0].engine_args.enable_lora",
            "models[0].lora_adapters[0].name",
            "models[0].lora_adapters[0].path",
            "models[0].deployments[0].replicas",
            "models[0].deployments[1].compute_class",
            "gateway.replicas",
            "gateway.max_waiting_requests",
            "auth.key_file",
        ]
    )


def test_names_are_unique_over_models_and_adapters() -> None:
    one, two = minimal()["models"][0], minimal()["models"][0]
    two["name"] = "other"
    two["engine_args"] = {"enable_lora": True}
    two["lora_adapters"] = [{"name": "demo", "path": "a"}, {"name": "other", "path": "b"}]
    assert [line.split(": ")[0] for line in problems({"models": [one, two]})] == [
        "models[1].lora_adapters[0].name",
        "models[1].lora_adapters[1].name",
    ]


def test_names_that_make_one_serve_deployment_are_refused() -> None:
    one, two = minimal(name="org/a")["models"][0], minimal(name="org-a")["models"][0]
    (line,) = problems({"models": [one, two]})
    assert line.startswith("models[1].deployments[0].compute_class: the deployment 'engine-org-a-")


def test_same_compute_class_serves_two_models() -> None:
    models = [minimal(name=name)["models"][0] for name in ("a", "b")]
    assert len(check({"models": models}).models) == 2


def test_plugin_may_bring_parsers_of_its_own() -> None:
    args = {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "mine",
        "tool_parser_plugin": "mine.py",
    }
    assert check(minimal(frontend_args=args)).models[0].frontend_args == args


def test_without_vllm_names_are_unchecked_but_closed_ones_are_refused() -> None:
    config = check_app_config(minimal(engine_args={"whatever": 1}), None)
    assert config.models[0].engine_args == {"whatever": 1}
    lines = problems(minimal(engine_args={"model": "x"}, frontend_args={"port": 1}), None)
    assert len(lines) == 2


def test_parse_checks_against_the_installed_vllm() -> None:
    raw = minimal(engine_args={"max_model_len": 2048, "max_num_sequences": 4})
    with pytest.raises(ConfigError, match=r"max_num_sequences: unknown key .*'max_num_seqs'"):
        parse_app_config(raw)


@pytest.mark.parametrize(
    ("auth", "host", "is_refused"),
    [
        (AuthConfig(), "127.0.0.1", False),
        (AuthConfig(), "::1", False),
        (AuthConfig(), "localhost", False),
        (AuthConfig(), "0.0.0.0", True),
        (AuthConfig(), "::", True),
        (AuthConfig(), "example.org", True),
        (AuthConfig(keys_env="KEYS"), "0.0.0.0", False),
        (AuthConfig(keys_file="keys.txt"), "0.0.0.0", False),
        (AuthConfig(allow_anonymous_beyond_loopback=True), "0.0.0.0", False),
    ],
)
def test_anonymous_use_ends_at_the_machine(
    auth: AuthConfig, host: str, *, is_refused: bool
) -> None:
    assert (exposure_problem(auth, host) is not None) == is_refused


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("hf_token", "abc", "<hidden>"),
        ("revision", "hf_abc", "<hidden>"),
        ("AWS_SECRET", "abc", "<hidden>"),
        ("tokenizer", "abc", '"abc"'),
        ("keys_env", "KEYS", '"KEYS"'),
        ("max_num_seqs", None, "null"),
        ("models", [1], "a list"),
        ("chat_template", "x" * 100, '"' + "x" * 79 + "..."),
    ],
)
def test_values_are_shown_short_and_without_secrets(name: str, value: object, text: str) -> None:
    assert shown(name, value) == text


# No deadline per example: the machine that runs this may be busy with something else.
@settings(deadline=None)
@given(interval_s=st.floats(0.001, 60), timeout_s=st.floats(0.001, 600))
def test_heartbeat_timeout_is_accepted_exactly_above_two_intervals(
    interval_s: float, timeout_s: float
) -> None:
    link = {
        "heartbeat_interval_s": interval_s,
        "heartbeat_timeout_s": timeout_s,
        "gateway_timeout_s": 600.0,
    }
    try:
        assert check(minimal() | {"link": link}).link == LinkConfig(**link)
    except ConfigError:
        assert timeout_s <= 2 * interval_s
    else:
        assert timeout_s > 2 * interval_s


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ("name", "source", "engine", "engine_args", "paced", "engine_env", "frontend_args")
LISTS = ("lora_adapters", "deployments")


@pytest.mark.slow
@settings(deadline=None)
@given(
    model=st.dictionaries(st.sampled_from(FIELDS + LISTS), JSON),
    sections=st.dictionaries(
        st.sampled_from(("gateway", "auth", "link", "health", "models")), JSON
    ),
)
def test_any_yaml_is_parsed_or_refused_in_words(
    model: dict[str, Any], sections: dict[str, Any]
) -> None:
    found: tuple[Problem, ...] = ()
    try:
        check(minimal(**model) | sections)
    except ConfigError as error:
        found = error.problems
    assert all(problem.path and problem.complaint and problem.allowed for problem in found)


def test_config_loads_neither_ray_nor_vllm_nor_torch() -> None:
    program = (
        "import sys, serving.config.application as c; c.installed_vllm_args();"
        "print([m for m in ('ray', 'vllm', 'torch', 'jax') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# -- canaries --


def canaried(**changes: Any) -> dict[str, Any]:
    """A model `demo` and a canary of it."""
    args = minimal(
        lora_adapters=[{"name": "sql", "path": "/sql"}], engine_args={"enable_lora": True}
    )
    stable = args["models"][0]
    canary = stable | {"name": "next", "canary_of": stable["name"], "canary_weight": 0.1} | changes
    return args | {"models": [stable, canary]}


def test_canary_may_have_the_adapters_of_its_model() -> None:
    stable, canary = check(canaried()).models
    assert canary.answers_as == (stable.name, "next")
    assert canary.version_id == stable.version_id


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"canary_of": "nobody"}, "models[1].canary_of"),
        ({"canary_of": "next"}, "models[1].canary_of"),
        ({"canary_weight": None}, "models[1].canary_weight"),
        ({"canary_weight": 1.5}, "models[1].canary_weight"),
        ({"canary_of": None, "lora_adapters": []}, "models[1].canary_weight"),
        ({"lora_adapters": [{"name": "law", "path": "/law"}]}, "models[1].lora_adapters[0].name"),
    ],
)
def test_canary_that_makes_no_sense_is_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(canaried(**changes))
    assert path in {problem.path for problem in refused.value.problems}


def test_second_canary_of_a_model_is_refused() -> None:
    args = canaried()
    args["models"].append(args["models"][1] | {"name": "third"})
    with pytest.raises(
        ConfigError, match=r"models\[2\].canary_of: already the model of the canary"
    ):
        check(args)


@pytest.mark.parametrize(
    ("auth", "is_taken"), [({}, False), ({"keys_file": "keys"}, True), ({"keys_env": "KEYS"}, True)]
)
def test_tenants_are_separated_only_where_keys_name_them(
    auth: dict[str, str], is_taken: bool
) -> None:
    gateway = {"separate_tenants": True}
    raw = {"models": [], "gateway": gateway, "auth": auth}
    with pytest.raises(ConfigError) as refusal:
        check_app_config(raw, None)
    problem = (
        "gateway.separate_tenants: without API keys everybody is the same tenant (value true); "
        "allowed: true only with auth.keys_file or auth.keys_env"
    )
    assert (problem in str(refusal.value)) is not is_taken


@pytest.mark.parametrize(
    ("engine_args", "problem"),
    [
        (
            {"allowed_media_domains": ["ok.example.com", "https://images.example.com"]},
            'models[0].engine_args.allowed_media_domains[1]: no host name (value "https://images'
            '.example.com"); allowed: small letters, digits, `.` and `-`, without scheme, port or'
            " `*`",
        ),
        (
            {"allowed_media_domains": ["*"]},
            'models[0].engine_args.allowed_media_domains[0]: no host name (value "*"); allowed: '
            "small letters, digits, `.` and `-`, without scheme, port or `*`",
        ),
        (
            {"allowed_local_media_path": "/x/../"},
            "models[0].engine_args.allowed_local_media_path: clients may read every file in it "
            '(value "/x/../"); allowed: an absolute path of a folder below the root, or nothing',
        ),
        (
            {"allowed_local_media_path": "media"},
            "models[0].engine_args.allowed_local_media_path: clients may read every file in it "
            '(value "media"); allowed: an absolute path of a folder below the root, or nothing',
        ),
        (
            {"mm_processor_cache_type": "shm"},
            'models[0].engine_args.mm_processor_cache_type: set by Slicewise (value "shm"); '
            "any of several engines may get a request, so each gets all of its images",
        ),
    ],
)
def test_sources_of_media_that_nobody_can_mean_are_refused(
    engine_args: dict[str, Any], problem: str
) -> None:
    assert problems(minimal(engine_args=engine_args), None) == [problem]


def test_sources_of_media_with_a_bound_are_taken() -> None:
    engine_args = {"allowed_media_domains": ["a.example.com"], "allowed_local_media_path": "/srv/x"}
    assert check_app_config(minimal(engine_args=engine_args), None).models[0].engine_args
