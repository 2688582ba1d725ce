"""Plans one engine on TPU: its settings, its memory, and what would fit if it does not.

Owns the order: refuse, set, count, advise. Advice is never a guess: each way out was planned and
counted by the same code before it is named. Pure.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from serving.domain.errors import ConfigError
from serving.domain.topology import SliceShape, engine_parts, parallelism_choices, shapes
from serving.tpu.hbm import HbmBudget, hbm_budget
from serving.tpu.model_facts import (
    ModelFacts,
    ModelFactsError,
    with_quantization,
    with_qwix,
)
from serving.tpu.published import FP8_EVERYWHERE
from serving.tpu.requirements import EngineRequirements, section
from serving.tpu.settings import EngineSettings, engine_settings

# A shorter context is offered in steps of this many tokens.
_LENGTH_STEP = 1024
# Arguments that belong to one slice shape; on another the sizes follow from it.
_OF_THE_SHAPE = ("tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True, slots=True)
class Division:
    """A slice that `num_engines` share, and the tokens that the cache of each would hold."""

    num_engines: int
    part: SliceShape
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The settings and memory of one engine.

    `budget` is `None` if it cannot be counted, and `uncounted` then has the reason. `advice` are
    ways in which it would fit, best first; empty when it does, and when nothing was found.
    `divisions` are the ways in which several such engines could share the slice, fewest first.
    """

    requirements: EngineRequirements
    settings: EngineSettings
    budget: HbmBudget | None
    uncounted: str = ""
    advice: tuple[str, ...] = ()
    divisions: tuple[Division, ...] = ()

    @property
    def host_cache_bytes(self) -> int:
        """What its cache in the host's memory takes there; 0 without one, or if not counted."""
        cache = self.settings.host_cache
        if cache is None or self.budget is None:
            return 0
        return cache.tokens * self.budget.kv_bytes_per_token * self.requirements.shape.num_devices

    @property
    def can_start(self) -> bool:
        """True unless the engine is known not to fit."""
        return self.budget is None or self.budget.fits


def plan_engine(
    requirements: EngineRequirements, facts: ModelFacts | None, path: str = "model"
) -> EnginePlan:
    """Returns the plan of one engine; `path` names the model in a refusal.

    Raises:
        ConfigError: tpu-inference would reject this or load it wrongly; it names what works.
    """
    settings = engine_settings(requirements, facts, path)
    if facts is None:
        return EnginePlan(requirements, settings, None, "the model's config.json is not at hand")
    try:
        budget = _budget(requirements, facts, settings)
    except ValueError as error:  # `ModelFactsError` is one
        return EnginePlan(requirements, settings, None, str(error))
    advice = () if budget.fits else tuple(_ways_out(requirements, facts, budget))
    divisions = tuple(_divisions(requirements, facts))
    return EnginePlan(requirements, settings, budget, advice=advice, divisions=divisions)


def ensure_fits(plan: EnginePlan) -> None:
    """Refuses an engine that is known not to fit.

    Raises:
        ValueError: it does not; the message names what would. Do not retry.
    """
    if plan.can_start or plan.budget is None:
        return
    complaint = "; ".join(plan.budget.complaints)
    raise ValueError(
        f"{plan.requirements.model} does not fit on {describe_slice(plan.requirements)}: "
        f"{complaint}. "
        f"What would fit: {'; '.join(plan.advice) or 'nothing that was tried'}"
    )


def describe_slice(requirements: EngineRequirements) -> str:
    """Returns the slices of an engine as text."""
    kind = f"{requirements.shape.generation} {requirements.shape.topology}"
    if requirements.num_engines > 1:
        return f"{kind}, one of {requirements.num_engines} parts of a slice"
    return kind if requirements.num_slices == 1 else f"{requirements.num_slices} x {kind}"


def _budget(
    requirements: EngineRequirements, facts: ModelFacts, settings: EngineSettings
) -> HbmBudget:
    if not facts.is_countable:
        raise ModelFactsError(f"the parameters of a {facts.architecture} are not counted here")
    method, rules = requirements.args.get("quantization"), requirements.qwix_rules
    if isinstance(method, str):
        facts = replace(facts, weights=with_quantization(facts.weights, method))
    elif rules:
        facts = replace(facts, weights=with_qwix(facts.weights, rules))
    return hbm_budget(facts, requirements.shape, settings.sharding, settings.memory)


def _ways_out(
    requirements: EngineRequirements, facts: ModelFacts, budget: HbmBudget
) -> Iterator[str]:
    shorter = budget.tokens_per_group // _LENGTH_STEP * _LENGTH_STEP
    if shorter and _would_fit(_with(requirements, max_model_len=shorter), facts):
        yield f"max_model_len {shorter}"
    for batched in (1024, 512, 256):
        if _would_fit(_with(requirements, max_num_batched_tokens=batched, max_num_seqs=64), facts):
            yield f"max_num_batched_tokens {batched} with max_num_seqs 64"
            break
    if facts.weights.method is None and "quantization" not in requirements.args:
        for words, args in (
            ("quantization fp8", {"quantization": "fp8"}),
            (f"additional_config {json.dumps(FP8_EVERYWHERE)}", _with_fp8_by_qwix(requirements)),
        ):
            quantized = _with(requirements, **args)
            if _would_fit(quantized, facts):
                yield words
            elif _would_fit(_with(quantized, max_model_len=_LENGTH_STEP * 8), facts):
                yield f"{words} with max_model_len {_LENGTH_STEP * 8}"
    if "kv_cache_dtype" not in requirements.args and _would_fit(
        _with(requirements, kv_cache_dtype="fp8"), facts
    ):
        yield "kv_cache_dtype fp8"
    for larger in shapes(requirements.shape.generation):
        stages = _fitting_stages(requirements, larger, facts)
        if stages is not None:
            hosts = f"{larger.num_hosts} hosts" if larger.num_hosts > 1 else "1 host"
            pipeline = f", pipeline_parallel_size {stages}" if stages > 1 else ""
            chips = f"({larger.num_chips} chips, {hosts}{pipeline})"
            yield f"{larger.generation} {larger.topology} {chips}"
            return


def _divisions(requirements: EngineRequirements, facts: ModelFacts) -> Iterator[Division]:
    """Yields how the slice of one engine could be divided among several; each was planned."""
    if requirements.num_slices > 1 or requirements.num_engines > 1 or requirements.strategy:
        return
    args = {name: value for name, value in requirements.args.items() if name not in _OF_THE_SHAPE}
    for num_engines, part in engine_parts(requirements.shape).items():
        of_part = replace(requirements, shape=part, args=args, num_engines=num_engines)
        try:
            budget = _budget(of_part, facts, engine_settings(of_part, facts))
        except (ConfigError, ValueError):
            continue
        if budget.fits:
            yield Division(num_engines, part, budget.cache_tokens)


def _with_fp8_by_qwix(requirements: EngineRequirements) -> dict[str, object]:
    given = section(requirements.args, "additional_config")
    return {"additional_config": {**given, **FP8_EVERYWHERE}}


def _fitting_stages(
    requirements: EngineRequirements, shape: SliceShape, facts: ModelFacts
) -> int | None:
    """Returns the fewest pipeline stages that fit on a larger slice; `None` if it does not fit."""
    if shape.num_chips <= requirements.shape.num_chips:
        return None
    args = {name: value for name, value in requirements.args.items() if name not in _OF_THE_SHAPE}
    for tensor, stages in parallelism_choices(shape):
        sized = args | {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        if _would_fit(replace(requirements, shape=shape, args=sized), facts):
            return stages
    return None


def _with(requirements: EngineRequirements, **changes: object) -> EngineRequirements:
    return replace(requirements, args=dict(requirements.args) | changes)


def _would_fit(requirements: EngineRequirements, facts: ModelFacts) -> bool:
    try:
        settings = engine_settings(requirements, facts)
        return _budget(requirements, facts, settings).fits
    except (ConfigError, ValueError):
        return False
