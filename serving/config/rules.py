"""The rules between the fields of a configuration, and the vLLM arguments left open.

Works on the raw YAML values, so that a broken field never hides a broken rule; a value of the wrong
type is passed over here because `serving.config.application` reports it. Pure.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from serving.artifacts.object_store.address import address_problem
from serving.artifacts.weights.sources import source_problems
from serving.config.schema import name_hint, shown
from serving.config.vllm_args import VllmArgs, kind_of
from serving.domain.deployment_names import engine_deployment_name
from serving.domain.errors import Problem

ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"

Raw = Mapping[str, object]

# The engines that are vLLM, by the name in `engine`.
VLLM_ENGINES = ("vllm", "vllm-tpu")

_ONE_ENGINE = "one engine owns one whole slice; for more engines raise `replicas`"
_HOSTS = "the slice replica spreads the engine over the hosts of its slice"
_NO_PROMPTS = "Slicewise logs neither prompts nor generated text"
_EDGE = "the gateway and the Serve proxy are the server; see http_options"
_ALL_OF_OPENAI = "the gateway serves the whole OpenAI surface"

# The arguments of vLLM that are not open, by section and complaint, each with the reason. A name
# that ends in * stands for all names that begin so.
CLOSED_ARGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "engine_args": {
        "set by Slicewise": {
            "model": "from `source`",
            "served_model_name": "from `name`",
            "scheduler_cls": "its scheduler is what lets requests resume",
            "worker_cls": "its worker is what lets requests resume",
            "enable_log_requests": _NO_PROMPTS,
            "disable_log_stats": "the load that engines report is read from these statistics",
            "data_parallel_*": _ONE_ENGINE,
            "enable_elastic_ep": _ONE_ENGINE,
            "elastic_ep_max_dp_size": _ONE_ENGINE,
            "distributed_executor_backend": _HOSTS,
            "nnodes": _HOSTS,
            "node_rank": _HOSTS,
            "master_addr": _HOSTS,
            "master_port": _HOSTS,
            "kv_events_config": "engines on one host would publish on the same address",
        },
        "refused": {
            "hf_token": "put HF_TOKEN into the environment of the hosts: Ray's dashboard shows "
            "this file",
            "tokens_only": _ALL_OF_OPENAI,
        },
    },
    "frontend_args": {
        "set by Slicewise": {
            "enable_log_requests": _NO_PROMPTS,
            "enable_log_outputs": _NO_PROMPTS,
            "enable_log_deltas": _NO_PROMPTS,
            "max_log_len": _NO_PROMPTS,
        },
        "refused": {
            "host": _EDGE,
            "port": _EDGE,
            "ssl_*": _EDGE,
            "uvicorn*": _EDGE,
            "disable_uvicorn*": _EDGE,
            "root_path": _EDGE,
            "middleware": _EDGE,
            "allowed_*": _EDGE,
            "allow_credentials": _EDGE,
            "headless": _EDGE,
            "api_server_count": "use gateway.replicas",
            "api_key": "use auth.keys_file or auth.keys_env",
            "lora_modules": "use lora_adapters",
            "tokens_only": _ALL_OF_OPENAI,
            "enable_scale_out": "the token link takes the place of these endpoints",
        },
    },
}

# The option that registers parsers vLLM does not know by itself.
_PARSER_PLUGINS = {
    "tool_call_parser": "tool_parser_plugin",
    "reasoning_parser": "reasoning_parser_plugin",
}


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches `host`; of names, only localhost counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def mappings_in(value: object) -> list[tuple[int, Raw]]:
    """Returns the mappings of a raw list, with their positions."""
    entries = value if isinstance(value, list) else []
    return [(index, entry) for index, entry in enumerate(entries) if isinstance(entry, dict)]


def mapping_in(raw: Raw, name: str) -> Raw:
    """Returns a raw field that is a mapping; an empty one in place of anything else."""
    value = raw.get(name)
    return value if isinstance(value, dict) else {}


def numbers_in(section: Raw, *names: str) -> list[float | None]:
    """Returns the values of these fields; `None` for one that is not a number."""
    values = (section.get(name) for name in names)
    return [
        value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        for value in values
    ]


def repeats(named: Sequence[tuple[str, object]]) -> Iterator[tuple[str, str, str]]:
    """Yields path, name and path of the first use, for every string used before."""
    strings = [(path, name) for path, name in named if isinstance(name, str)]
    first_path: dict[str, str] = {}
    for path, name in strings:
        if name in first_path:
            yield path, name, first_path[name]
        first_path.setdefault(name, path)


def model_problems(path: str, model: Raw, vllm_args: VllmArgs | None) -> Iterator[Problem]:
    """Yields what is impossible within one model."""
    yield from _engine_kind_problems(path, model)
    source = model.get("source")
    if isinstance(source, str) and model.get("engine") != "paced":
        yield from source_problems(path, source, mapping_in(model, "engine_args"))
    yield from _adapter_problems(path, model)
    yield from _tool_choice_problems(path, model)
    yield from _reasoning_problems(path, model)
    yield from _arg_problems(path, model, vllm_args)


def duplicate_name_problems(models: Sequence[tuple[int, Raw]]) -> Iterator[Problem]:
    """Yields names that mean two things: of models and adapters, and of Serve deployments."""
    served: list[tuple[str, object]] = []
    deployed: list[tuple[str, str]] = []
    for index, model in models:
        path = f"models[{index}]"
        served.append((f"{path}.name", model.get("name")))
        if model.get("canary_of") is None:  # a canary may have the adapters of its model
            served.extend(
                (f"{path}.lora_adapters[{number}].name", adapter.get("name"))
                for number, adapter in mappings_in(model.get("lora_adapters"))
            )
        deployed.extend(
            (
                f"{path}.deployments[{number}].compute_class",
                engine_deployment_name(str(model.get("name")), str(entry["compute_class"])),
            )
            for number, entry in mappings_in(model.get("deployments"))
            if "compute_class" in entry
        )
    allowed = "allowed: a name that no other model or adapter has"
    for path, name, first in repeats(served):
        yield Problem(path, f"already the name at {first}", allowed, shown("name", name))
    allowed = "allowed: a compute class once per model, and no two deployments of one name"
    for path, name, first in repeats(deployed):
        yield Problem(path, f"the deployment {name!r} is already the one at {first}", allowed)


def canary_problems(models: Sequence[tuple[int, Raw]]) -> Iterator[Problem]:
    """Yields canaries of nothing, of canaries, of a model that has one, or without a weight."""
    stable = [model.get("name") for _, model in models if model.get("canary_of") is None]
    allowed = "allowed: the name of another model that is no canary; here: "
    allowed += ", ".join(sorted(f"`{name}`" for name in stable if isinstance(name, str)))
    targets: list[tuple[str, object]] = []
    for index, model in models:
        path, target = f"models[{index}]", model.get("canary_of")
        if target is None:
            if model.get("canary_weight") is not None:
                complaint = "given to a model that is no canary"
                yield Problem(f"{path}.canary_weight", complaint, "allowed: only with canary_of")
            continue
        targets.append((f"{path}.canary_of", target))
        if target not in stable:
            complaint = "there is no such model"
            yield Problem(f"{path}.canary_of", complaint, allowed, shown("canary_of", target))
        if model.get("canary_weight") is None:
            complaint = "missing, so nobody knows how much the canary takes"
            yield Problem(f"{path}.canary_weight", complaint, "required with canary_of: 0 to 1")
        yield from _canary_adapter_problems(path, model, models)
    for path, target, first in repeats(targets):
        allowed = "allowed: one canary of each model"
        complaint = f"already the model of the canary at {first}"
        yield Problem(path, complaint, allowed, shown("canary_of", target))


def _canary_adapter_problems(
    path: str, canary: Raw, models: Sequence[tuple[int, Raw]]
) -> Iterator[Problem]:
    """Yields adapters of a canary that its model lacks, because nobody could request them."""
    known = [
        adapter.get("name")
        for _, model in models
        if model.get("name") == canary.get("canary_of")
        for _, adapter in mappings_in(model.get("lora_adapters"))
    ]
    for number, adapter in mappings_in(canary.get("lora_adapters")):
        if adapter.get("name") not in known:
            at = f"{path}.lora_adapters[{number}].name"
            complaint = "not an adapter of the model that it is a canary of"
            allowed = "allowed: the names of that model's adapters"
            yield Problem(at, complaint, allowed, shown("name", adapter.get("name")))


def scaling_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields bounds of a scaling deployment that contradict each other or its replicas."""
    for number, deployment in mappings_in(model.get("deployments")):
        at = f"{path}.deployments[{number}]"
        given = [
            name for name in ("min_replicas", "max_replicas") if deployment.get(name) is not None
        ]
        if len(given) == 1:
            missing = "max_replicas" if given == ["min_replicas"] else "min_replicas"
            yield Problem(f"{at}.{missing}", "missing", f"required with {at}.{given[0]}")
            continue
        least, most, replicas = numbers_in(deployment, "min_replicas", "max_replicas", "replicas")
        if not given:
            if replicas == 0:
                complaint = "a deployment that does not scale has an engine"
                allowed = "allowed: at least 1, or min_replicas: 0 and a max_replicas"
                yield Problem(f"{at}.replicas", complaint, allowed, "0")
            continue
        if least is None or most is None:
            continue
        if least > most:
            allowed = f"allowed: at most {at}.max_replicas, {most:g}"
            yield Problem(f"{at}.min_replicas", "more than the most", allowed, f"{least:g}")
        elif replicas is not None and not least <= replicas <= most:
            allowed = f"allowed: {least:g} to {most:g}, min_replicas to max_replicas"
            yield Problem(f"{at}.replicas", "outside its own bounds", allowed, f"{replicas:g}")


def gateway_problems(gateway: Raw) -> Iterator[Problem]:
    """Yields a bound on waiting that can never be reached."""
    waiting, ongoing = numbers_in(gateway, "max_waiting_requests", "max_ongoing_requests")
    if waiting is not None and ongoing is not None and waiting > ongoing:
        yield Problem(
            "gateway.max_waiting_requests",
            "more than the requests a gateway holds at all",
            f"allowed: at most gateway.max_ongoing_requests, {ongoing:g}",
            f"{waiting:g}",
        )


def auth_problems(auth: Raw) -> Iterator[Problem]:
    """Yields a second source of API keys."""
    yield from _one_source("auth", auth, "keys_file", "keys_env")


def link_problems(link: Raw) -> Iterator[Problem]:
    """Yields a second secret, and a timeout that one late heartbeat would exceed."""
    yield from _one_source("link", link, "secret_file", "secret_env")
    interval_s, timeout_s = numbers_in(link, "heartbeat_interval_s", "heartbeat_timeout_s")
    if interval_s is not None and timeout_s is not None and timeout_s <= 2 * interval_s:
        yield Problem(
            "link.heartbeat_timeout_s",
            "one late heartbeat would cut the link",
            f"allowed: more than {2 * interval_s:g}, twice link.heartbeat_interval_s",
            f"{timeout_s:g}",
        )


def health_problems(health: Raw) -> Iterator[Problem]:
    """Yields a hang that would be declared before the second check."""
    period_s, timeout_s = numbers_in(health, "check_period_s", "hang_timeout_s")
    if period_s is not None and timeout_s is not None and timeout_s <= period_s:
        yield Problem(
            "health.hang_timeout_s",
            "not longer than the time between two checks",
            f"allowed: more than {period_s:g}, health.check_period_s",
            f"{timeout_s:g}",
        )


def tracing_problems(tracing: Raw) -> Iterator[Problem]:
    """Yields a share of requests to trace that has no destination for spans."""
    if tracing.get("sample_ratio") is not None and tracing.get("otlp_endpoint") is None:
        yield Problem(
            "tracing.otlp_endpoint",
            "missing, so nothing is traced",
            "required with tracing.sample_ratio: an address such as `http://collector:4318`",
        )


def pace_problems(path: str, pace: Raw) -> Iterator[Problem]:
    """Yields a bound on the paced engine's step below one token for every running request."""
    rate, budget, num_seqs = numbers_in(
        pace, "prefill_tokens_per_s", "max_num_batched_tokens", "max_num_seqs"
    )
    if rate is None or budget is None or num_seqs is None:
        return
    if budget < num_seqs:
        yield Problem(
            f"{path}.max_num_batched_tokens",
            f"too few, with {path}.prefill_tokens_per_s, for a token of every request",
            f"allowed: at least {num_seqs:g}, {path}.max_num_seqs",
            f"{budget:g}",
        )


def _engine_kind_problems(path: str, model: Raw) -> Iterator[Problem]:
    engine = model.get("engine", "vllm")
    if engine == "paced":
        for name in ("engine_args", "lora_adapters"):
            if model.get(name):
                yield Problem(
                    f"{path}.{name}",
                    "engine paced has none",
                    "allowed: leave it out, or engine vllm",
                )
    elif engine in VLLM_ENGINES and model.get("paced") is not None:
        complaint = f"engine {engine} has no pace"
        yield Problem(f"{path}.paced", complaint, "allowed: only with engine paced")
    if engine in ("vllm", "paced") and model.get("compile_cache") is not None:
        yield Problem(
            f"{path}.compile_cache",
            f"engine {engine} compiles nothing that is kept",
            "allowed: only with engine vllm-tpu",
            shown("compile_cache", model["compile_cache"]),
        )
    store = mapping_in(model, "compile_cache").get("store")
    problem = address_problem(store) if isinstance(store, str) and store else None
    if problem is not None:
        allowed = "allowed: an absolute folder, gs://BUCKET/... or s3://BUCKET/..."
        yield Problem(f"{path}.compile_cache.store", problem, allowed, shown("store", store))


def _adapter_problems(path: str, model: Raw) -> Iterator[Problem]:
    engine_args = mapping_in(model, "engine_args")
    enabled = engine_args.get("enable_lora")
    is_vllm = model.get("engine", "vllm") in VLLM_ENGINES
    if model.get("lora_adapters") and is_vllm and enabled is not True:
        yield Problem(
            f"{path}.engine_args.enable_lora",
            f"{path}.lora_adapters needs it",
            "allowed: true, or no lora_adapters",
            shown("enable_lora", enabled) if "enable_lora" in engine_args else None,
        )


def _tool_choice_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields automatic tool choice without its parser, or the reverse."""
    args = mapping_in(model, "frontend_args")
    parser, automatic = args.get("tool_call_parser"), args.get("enable_auto_tool_choice")
    if parser is not None and automatic is not True:
        yield Problem(
            f"{path}.frontend_args.tool_call_parser",
            "without automatic tool choice it is never used",
            "allowed: only with enable_auto_tool_choice: true",
            shown("tool_call_parser", parser),
        )
    if automatic is True and parser is None:
        yield Problem(
            f"{path}.frontend_args.tool_call_parser",
            "missing",
            "required by enable_auto_tool_choice: true",
        )


def _reasoning_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields a second reasoning parser, because vLLM 0.32 fails at start when it finds two."""
    args = mapping_in(model, "engine_args")
    for name in ("reasoning_parser", "reasoning_parser_plugin"):
        if args.get(name) and isinstance(args.get("structured_outputs_config"), dict):
            yield Problem(
                f"{path}.engine_args.{name}",
                "structured_outputs_config is given as well",
                f"allowed: {name} within structured_outputs_config",
                shown(name, args[name]),
            )


def _arg_problems(path: str, model: Raw, vllm_args: VllmArgs | None) -> Iterator[Problem]:
    for section in CLOSED_ARGS:
        args = mapping_in(model, section)
        for name, value in args.items():
            if not isinstance(name, str) or kind_of(value) == "something else":
                continue
            verdict = _closed(section, name, vllm_args)
            if verdict is None and vllm_args is not None:
                verdict = _unaccepted(section, name, args, vllm_args)
            if verdict is not None:
                yield Problem(f"{path}.{section}.{name}", *verdict, value=shown(name, value))


def _closed(section: str, name: str, vllm_args: VllmArgs | None) -> tuple[str, str] | None:
    """Returns complaint and reason; `None` if Slicewise leaves this argument open."""
    for complaint, reasons in CLOSED_ARGS[section].items():
        for pattern, reason in reasons.items():
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                return complaint, reason
    if section == "frontend_args" and vllm_args is not None and name in vllm_args.server:
        return "refused", _EDGE
    return None


def _unaccepted(section: str, name: str, args: Raw, vllm_args: VllmArgs) -> tuple[str, str] | None:
    """Returns complaint and what is allowed; `None` if vLLM takes this argument and value."""
    sections = {"engine_args": vllm_args.engine, "frontend_args": vllm_args.frontend}
    spec = sections[section].get(name)
    if spec is None:
        elsewhere = [other for other, known in sections.items() if name in known]
        if elsewhere:
            return "unknown key", f"allowed: in {elsewhere[0]}"
        is_open = [known for known in sections[section] if not _closed(section, known, vllm_args)]
        return "unknown key", name_hint(name, is_open)
    value = args[name]
    if not spec.accepts(value):
        return "not allowed", f"allowed: {spec.allowed}"
    parsers = vllm_args.parsers.get(name)
    if parsers and value and value not in parsers and not args.get(_PARSER_PLUGINS[name]):
        return "unknown parser", name_hint(str(value), parsers)
    return None


def _one_source(path: str, section: Raw, first: str, second: str) -> Iterator[Problem]:
    if section.get(first) is not None and section.get(second) is not None:
        yield Problem(
            f"{path}.{second}",
            f"{path}.{first} is given as well",
            f"allowed: {first} or {second}, not both",
            shown(second, section.get(second)),
        )
