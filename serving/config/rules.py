"""The rules between the fields of a configuration; those of slices are in `slice_rules`.

Works on the raw YAML values, so that a broken field never hides a broken rule; a value of the wrong
type is passed over here because `serving.config.application` reports it. Pure.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from serving.artifacts.object_store.address import address_problem, bucket_problem
from serving.artifacts.weights.sources import source_problems
from serving.config.schema import shown
from serving.domain import limits
from serving.domain.errors import Problem
from serving.domain.names.deployment_names import engine_deployment_name

Raw = Mapping[str, object]

# The engines that are vLLM, by the name in `engine`.
VLLM_ENGINES = ("vllm", "vllm-tpu")
# In it a lease is renewed four times.
_LEAST_BUCKET_LEASE_S = 20.0
# Arguments that vLLM counts among its engine's and that its frontend heeds alone: a paced engine's
# frontend is vLLM's too.
OF_THE_FRONTEND = {"reasoning_parser", "reasoning_parser_plugin"}


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


def model_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields what is impossible within one model."""
    yield from _engine_kind_problems(path, model)
    source = model.get("source")
    if isinstance(source, str) and model.get("engine") != "paced":
        yield from source_problems(path, source, mapping_in(model, "engine_args"))
    yield from _adapter_problems(path, model)


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
        elif replicas is not None and replicas != least:
            complaint = "a deployment that scales starts with the fewest, and goes on as it is"
            allowed = f"allowed: left out, or {at}.min_replicas, {least:g}"
            yield Problem(f"{at}.replicas", complaint, allowed, f"{replicas:g}")


def gateway_problems(gateway: Raw) -> Iterator[Problem]:
    """Yields bounds that contradict each other."""
    waiting, ongoing = numbers_in(gateway, "max_waiting_requests", "max_ongoing_requests")
    if waiting is not None and ongoing is not None and waiting > ongoing:
        yield Problem(
            "gateway.max_waiting_requests",
            "more than the requests a gateway holds at all",
            f"allowed: at most gateway.max_ongoing_requests, {ongoing:g}",
            f"{waiting:g}",
        )
    yield from _no_room_for_one("body", "gateway", gateway, "max_body_bytes", "body_budget_bytes")
    yield from _no_room_for_one(
        "answer", "gateway", gateway, "max_unread_bytes", "unread_budget_bytes"
    )
    for name in ("expected_tokens_per_s", "expected_requests_per_s"):
        if gateway.get(name) is not None and gateway.get("replicas") != "auto":
            yield Problem(
                f"gateway.{name}",
                "nobody reads it where gateway.replicas is a number",
                "allowed: only with gateway.replicas: auto",
                shown(name, gateway.get(name)),
            )
    least, most = numbers_in(gateway, "min_hold_s", "max_hold_s")
    if least is not None and most is not None and least > most:
        yield Problem(
            "gateway.min_hold_s",
            "longer than tokens may wait at all",
            f"allowed: at most gateway.max_hold_s, {most:g}",
            f"{least:g}",
        )


def batch_problems(batches: Raw, gateway: Raw) -> Iterator[Problem]:
    """Yields batches that would leave clients no place to wait, and files beyond all room."""
    at_once, in_flight = numbers_in(batches, "batches_at_once", "lines_in_flight")
    (waiting,) = numbers_in(gateway, "max_waiting_requests")
    lines = None if at_once is None or in_flight is None else at_once * in_flight
    yield from _batch_place_problems(batches)
    is_on = batches.get("folder") is not None or batches.get("store") is not None
    if is_on and lines is not None and waiting is not None and lines > waiting / 2:
        yield Problem(
            "batches.lines_in_flight",
            f"with {at_once:g} batches at once more than half of what may wait",
            "allowed: so many that all batches have at most half of "
            f"gateway.max_waiting_requests, {waiting:g}",
            f"{in_flight:g}",
        )
    yield from _no_room_for_one("file", "batches", batches, "max_file_bytes", "max_tenant_bytes")


def _batch_place_problems(batches: Raw) -> Iterator[Problem]:
    store = batches.get("store")
    if not isinstance(store, str) or not store:
        return
    problem = bucket_problem(store)
    if problem is not None:
        allowed = "allowed: gs://BUCKET/... or s3://BUCKET/..."
        yield Problem("batches.store", problem, allowed, shown("store", store))
    if batches.get("folder") is not None:
        complaint = "batches are kept in batches.store already"
        yield Problem("batches.folder", complaint, "allowed: one of the two")
    (lease_s,) = numbers_in(batches, "lease_s")
    if lease_s is not None and lease_s < _LEAST_BUCKET_LEASE_S:
        yield Problem(
            "batches.lease_s",
            "too short for a bucket, which bears few writes",
            f"allowed: at least {_LEAST_BUCKET_LEASE_S:g} with batches.store",
            f"{lease_s:g}",
        )


def _no_room_for_one(
    what: str, section: str, raw: Raw, of_one: str, of_all: str
) -> Iterator[Problem]:
    """Yields a bound of all together that is less than the bound of one."""
    one, every = numbers_in(raw, of_one, of_all)
    if one is not None and every is not None and one > every:
        yield Problem(
            f"{section}.{of_all}",
            f"no room for one {what} of the length allowed",
            f"allowed: at least {section}.{of_one}, {one:.0f}",
            f"{every:.0f}",
        )


def auth_problems(auth: Raw) -> Iterator[Problem]:
    """Yields a second source of API keys."""
    yield from _one_source("auth", auth, "keys_file", "keys_env")


def tenant_problems(gateway: Raw, auth: Raw) -> Iterator[Problem]:
    """Yields tenants that are to be separated where nobody has a key, and so a tenant."""
    has_keys = auth.get("keys_file") is not None or auth.get("keys_env") is not None
    if gateway.get("separate_tenants") is True and not has_keys:
        yield Problem(
            "gateway.separate_tenants",
            "without API keys everybody is the same tenant",
            "allowed: true only with auth.keys_file or auth.keys_env",
            "true",
        )


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
    (patience_s,) = numbers_in(link, "gateway_timeout_s")
    if interval_s is not None and patience_s is not None and patience_s <= 2 * interval_s:
        yield Problem(
            "link.gateway_timeout_s",
            "one late heartbeat would cut the link",
            f"allowed: more than {2 * interval_s:g}, twice link.heartbeat_interval_s",
            f"{patience_s:g}",
        )


def health_problems(health: Raw) -> Iterator[Problem]:
    """Yields a hang that would be declared before the second check."""
    period_s, timeout_s = numbers_in(health, "check_period_s", "hang_timeout_s")
    if health.get("hang_timeout_s") is None:
        timeout_s = limits.PACED_HANG_TIMEOUT_S
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
    """Yields bounds of the paced engine that leave a request without a token, or without room."""
    yield from _pace_cache_problems(path, pace)
    most_of_one, longest = numbers_in(pace, "long_prefill_token_threshold", "max_model_len")
    if most_of_one is not None and longest is not None and most_of_one > longest:
        yield Problem(
            f"{path}.long_prefill_token_threshold",
            "more than a prompt has",
            f"allowed: up to {longest:g}, {path}.max_model_len; 0 bounds nothing",
            f"{most_of_one:g}",
        )
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


def _pace_cache_problems(path: str, pace: Raw) -> Iterator[Problem]:
    if pace.get("kv_cache_tokens") is None:
        return
    if pace.get("prefill_tokens_per_s") is None:
        yield Problem(
            f"{path}.kv_cache_tokens",
            "prompts take no time, so there is nothing to find",
            f"allowed: with {path}.prefill_tokens_per_s",
        )
    room, block, longest = numbers_in(pace, "kv_cache_tokens", "block_size", "max_model_len")
    if room is None or block is None or longest is None or block < 1:
        return
    if room // block * block < longest:
        yield Problem(
            f"{path}.kv_cache_tokens",
            f"a request of {path}.max_model_len has no room in whole blocks of {block:g}",
            f"allowed: at least {-(-longest // block) * block:g}",
            f"{room:g}",
        )


def _engine_kind_problems(path: str, model: Raw) -> Iterator[Problem]:
    engine = model.get("engine", "vllm")
    if engine == "paced":
        yield from _paced_engine_problems(path, model)
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


def _paced_engine_problems(path: str, model: Raw) -> Iterator[Problem]:
    if not mapping_in(model, "engine_args").keys() <= OF_THE_FRONTEND:
        names = " and ".join(sorted(OF_THE_FRONTEND))
        yield Problem(
            f"{path}.engine_args",
            "engine paced has none",
            f"allowed: {names}, which are its frontend's, or engine vllm",
        )
    if model.get("lora_adapters"):
        yield Problem(
            f"{path}.lora_adapters",
            "engine paced has none",
            "allowed: leave it out, or engine vllm",
        )


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
    room, adapters = engine_args.get("max_cpu_loras"), model.get("lora_adapters")
    if isinstance(room, int) and isinstance(adapters, list) and room < len(adapters):
        yield Problem(
            f"{path}.engine_args.max_cpu_loras",
            "an engine would read adapters again while it answers",
            f"allowed: at least {len(adapters)}, the number of lora_adapters, or left out",
            shown("max_cpu_loras", room),
        )


def _one_source(path: str, section: Raw, first: str, second: str) -> Iterator[Problem]:
    if section.get(first) is not None and section.get(second) is not None:
        yield Problem(
            f"{path}.{second}",
            f"{path}.{first} is given as well",
            f"allowed: {first} or {second}, not both",
            shown(second, section.get(second)),
        )
