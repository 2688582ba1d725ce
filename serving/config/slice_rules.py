"""The rules between the fields of slices, compute classes and the engines that use them.

Works on the raw YAML values, for the same reason as `serving.config.rules`. Pure.
"""

from collections.abc import Iterator, Sequence

from serving.config.rules import (
    VLLM_ENGINES,
    Raw,
    mapping_in,
    mappings_in,
    numbers_in,
    repeats,
)
from serving.config.schema import name_hint, shown
from serving.domain.compute_class import MARKETS, MAX_FLEX_START_RUN_S, Market
from serving.domain.errors import Problem
from serving.domain.topology import (
    Generation,
    SliceShape,
    TopologyError,
    check_parallelism,
    engine_shape,
    sees_whole_stages,
    slice_shape,
)
from serving.tpu.requirements import EngineRequirements
from serving.tpu.rules import argument_problems

_TENSOR, _PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"


def model_slice_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields slices that do not exist, and sizes with which an engine does not fill its slice."""
    for number, deployment in mappings_in(model.get("deployments")):
        wanted = mapping_in(deployment, "slice")
        at = f"{path}.deployments[{number}].slice"
        generation, topology = wanted.get("generation"), wanted.get("topology")
        if generation not in tuple(Generation) or not isinstance(topology, str):
            continue
        field = "topology"
        try:
            shape = slice_shape(str(generation), topology)
            field = "chips_per_host"
            shape = slice_shape(str(generation), topology, _integer(wanted, field))
            field = "num_engines"
            shape = engine_shape(shape, _integer(wanted, field) or 1)
        except TopologyError as error:
            value = shown(field, wanted[field])
            yield Problem(f"{at}.{field}", error.complaint, _nearest(error), value)
        else:
            yield from _parallelism_problems(path, model, at, shape)
            yield from _divided_problems(at, wanted)


def tpu_engine_problems(path: str, model: Raw) -> Iterator[Problem]:
    """Yields what vLLM on TPU would reject or load wrongly, as far as the arguments show it.

    The faults of the model's own configuration are found when the engine is planned.
    """
    if model.get("engine") != "vllm-tpu":
        return
    found: set[Problem] = set()
    for number, deployment in mappings_in(model.get("deployments")):
        if deployment.get("slice") is None:
            at = f"{path}.deployments[{number}].slice"
            yield Problem(at, "missing", "required by engine vllm-tpu, which owns whole slices")
            continue
        shape = _shape(mapping_in(deployment, "slice"))
        if shape is None:
            continue
        env = mapping_in(model, "engine_env")
        requirements = EngineRequirements(
            model=str(model.get("name")),
            shape=shape,
            args=mapping_in(model, "engine_args"),
            env={name: value for name, value in env.items() if isinstance(value, str)},
            num_slices=_integer(mapping_in(deployment, "slice"), "num_slices") or 1,
        )
        for problem in argument_problems(path, requirements):
            if problem not in found:
                found.add(problem)
                yield problem


def compute_class_problems(config: Raw, models: Sequence[tuple[int, Raw]]) -> Iterator[Problem]:
    """Yields names that mean two classes or none, and values that a market does not have."""
    declared = mappings_in(config.get("compute_classes"))
    named = [(f"compute_classes[{at}].name", entry.get("name")) for at, entry in declared]
    for path, name, first in repeats(named):
        allowed = "allowed: a name that no other compute class has"
        yield Problem(path, f"already the name at {first}", allowed, shown("name", name))
    for at, entry in declared:
        market = entry.get("market")
        if market in tuple(Market):
            yield from _market_problems(f"compute_classes[{at}]", entry, Market(str(market)))
    if isinstance(config.get("compute_classes", []), list):
        names = {name for _, name in named if isinstance(name, str)}
        yield from _undeclared_problems(models, names)


def _divided_problems(at: str, wanted: Raw) -> Iterator[Problem]:
    """Yields a slice that is to be divided among engines and joined with others under one."""
    num_engines = _integer(wanted, "num_engines") or 1
    if num_engines > 1 and (_integer(wanted, "num_slices") or 1) > 1:
        yield Problem(
            f"{at}.num_engines",
            "num_slices joins slices under one engine",
            "allowed: 1, or num_slices: 1 and more replicas",
            shown("num_engines", num_engines),
        )


def _parallelism_problems(path: str, model: Raw, at: str, shape: SliceShape) -> Iterator[Problem]:
    """Yields given sizes that do not fit the slice; sizes left out follow from it at the start.

    A sharding strategy gives the sizes another meaning, which tpu-inference judges.
    """
    args = mapping_in(model, "engine_args")
    sharding = mapping_in(mapping_in(args, "additional_config"), "sharding")
    tensor, pipeline = _integer(args, _TENSOR), _integer(args, _PIPELINE)
    is_vllm = model.get("engine", "vllm") in VLLM_ENGINES
    # Copies of a model within an engine are judged with the rest of it (`serving.tpu.rules`).
    has_copies = (_integer(args, "data_parallel_size") or 1) > 1
    is_judged_here = is_vllm and not has_copies and not sharding.get("sharding_strategy")
    if not is_judged_here or (tensor is None and pipeline is None):
        return
    # Without a pipeline size vLLM makes one stage.
    stages = 1 if pipeline is None else pipeline
    if model.get("engine") == "vllm-tpu" and not sees_whole_stages(shape, stages):
        return  # `serving.tpu.rules` refuses them, with the reason.
    each = shape.num_devices // max(1, stages) if tensor is None else tensor
    try:
        check_parallelism(shape, each, stages)
    except TopologyError as error:
        name = _PIPELINE if tensor is None else _TENSOR
        complaint = f"does not suit {at}: {error.complaint}"
        yield Problem(f"{path}.engine_args.{name}", complaint, _nearest(error), error.value)


def _undeclared_problems(
    models: Sequence[tuple[int, Raw]], declared: set[str]
) -> Iterator[Problem]:
    """Yields deployments with a slice, but no compute class that it could come from."""
    known = declared | {market.value for market in Market}
    for index, model in models:
        for number, deployment in mappings_in(model.get("deployments")):
            name = deployment.get("compute_class")
            if deployment.get("slice") is None or not isinstance(name, str) or name in known:
                continue
            yield Problem(
                f"models[{index}].deployments[{number}].compute_class",
                "has a slice, but is not declared in compute_classes",
                name_hint(name, known),
                shown("compute_class", name),
            )


def _market_problems(path: str, entry: Raw, market: Market) -> Iterator[Problem]:
    """Yields values of a compute class that its market does not have."""
    name = entry.get("name")
    if name in tuple(Market) and name != market:
        yield Problem(
            f"{path}.market",
            f"the class {name} is built in, with a market of its own",
            f"allowed: {name}, or another name for the class",
            shown("market", market.value),
        )
    run_s, notice_s = numbers_in(entry, "max_run_duration_s", "drain_notice_s")
    if market is Market.FLEX_START:
        is_endless = entry.get("max_run_duration_s", MAX_FLEX_START_RUN_S) is None
        if is_endless or (run_s is not None and run_s > MAX_FLEX_START_RUN_S):
            yield Problem(
                f"{path}.max_run_duration_s",
                "a flex-start slice ends sooner",
                f"allowed: at most {MAX_FLEX_START_RUN_S}",
                shown("max_run_duration_s", entry["max_run_duration_s"]),
            )
    longest_s = min(filter(None, (run_s, MARKETS[market].max_drain_notice_s)), default=None)
    if notice_s is not None and longest_s is not None and notice_s > longest_s:
        yield Problem(
            f"{path}.drain_notice_s",
            f"longer than a {market} slice of this class can be told",
            f"allowed: at most {longest_s:g}",
            f"{notice_s:g}",
        )


def _shape(wanted: Raw) -> SliceShape | None:
    """Returns what an engine has of the slice that its deployment requests; `None` if nothing."""
    generation, topology = wanted.get("generation"), wanted.get("topology")
    if generation not in tuple(Generation) or not isinstance(topology, str):
        return None
    try:
        shape = slice_shape(str(generation), topology, _integer(wanted, "chips_per_host"))
        return engine_shape(shape, _integer(wanted, "num_engines") or 1)
    except TopologyError:
        return None


def _nearest(error: TopologyError) -> str:
    return f"nearest allowed: {', '.join(error.choices)}"


def _integer(raw: Raw, name: str) -> int | None:
    value = raw.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
