"""Defines `slicewise engine-plan`: it reports the arguments of each TPU engine, and their reasons.

Owns the report. `serving.tpu` decides the arguments, with the code that decides them again on the
engine's first host before the engine starts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from serving.artifacts.model_config_file import ModelConfigUnreadableError, find_model_config
from serving.config.check import check_serve_config
from serving.config.models import DeploymentConfig, ModelConfig
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import VllmArgs, installed_vllm_args
from serving.domain.errors import ConfigError, UnsupportedVllmError
from serving.tpu.hbm import HbmBudget, gib
from serving.tpu.model_facts import ModelFacts, ModelFactsError, model_facts
from serving.tpu.plan import Division, EnginePlan, describe_slice, plan_engine
from serving.tpu.published import PublishedFigure, Recipe, published_for, recipe_for
from serving.tpu.requirements import EngineRequirements
from serving.tpu.settings import Setting

# Facts of the models in the shipped examples.
SHIPPED_FACTS = Path(__file__).parent / "tpu" / "models"

_CANNOT, _UNUSABLE = 1, 2
# Of a recipe: sizes follow from the slice, and how long a request may be is the model's to say and
# no tuning; recipes have the length of the load that they were measured with.
_NOT_TAKEN = frozenset({"tensor_parallel_size", "max_model_len"})
_RECIPE = "recipe: "
_NAME_WIDTH = 42


@dataclass(frozen=True, slots=True)
class EnginePlanReport:
    """The plans of a file's engines on TPU, and what is wrong with those that have none."""

    plans: tuple[EnginePlan, ...]
    problems: tuple[str, ...]

    @property
    def can_start(self) -> bool:
        """Returns whether nothing is known that keeps any of them from starting."""
        return not self.problems and all(plan.can_start for plan in self.plans)


def engine_plan_command(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, metavar="FILE")
    ],
    models: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with files of model facts; by default `models` beside FILE.",
        ),
    ] = None,
    recipe: Annotated[  # noqa: FBT002 a flag of a command
        bool,
        typer.Option(
            "--recipe",
            help="Plan with what others have published for the model on these chips, beside what "
            "FILE sets, and print what to write into FILE for it.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plans as one JSON list.")] = False,  # noqa: FBT002 a flag of a command
) -> None:
    """What each vllm-tpu engine of FILE starts with, why, and whether it fits into memory.

    Exit status: 0 if each fits or could not be counted, 1 if one cannot start, 2 if FILE is of no
    use here.
    """
    try:
        raw = load_yaml(file.read_text(encoding="utf-8"))
        folders = [models or file.parent / "models"]
        report = plan_serve_config(raw, installed_vllm_args(), folders, takes_recipe=recipe)
    except (yaml.YAMLError, UnicodeDecodeError, UnsupportedVllmError) as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    if as_json:
        typer.echo(json.dumps([plan_json(plan) for plan in report.plans], indent=2))
    else:
        for plan in report.plans:
            typer.echo("\n".join(plan_lines(plan)) + "\n")
    for problem in report.problems:
        typer.echo(f"{file}: {problem}", err=True)
    if not report.plans and not report.problems:
        typer.echo(f"{file}: no model with engine vllm-tpu", err=True)
        raise typer.Exit(_UNUSABLE)
    if not report.can_start:
        raise typer.Exit(_CANNOT)


def plan_serve_config(
    raw: object,
    vllm_args: VllmArgs | None,
    facts_folders: Sequence[Path],
    *,
    takes_recipe: bool = False,
) -> EnginePlanReport:
    """The plans of all engines on TPU in a parsed serve_config.yaml, and what is wrong with it."""
    checked = check_serve_config(raw, vllm_args)
    if checked.problems:
        return EnginePlanReport((), tuple(map(str, checked.problems)))
    plans, problems = [], []
    for config in checked.applications.values():
        for model in config.models:
            for deployment in model.deployments if model.is_on_tpu else ():
                try:
                    plan = plan_deployment(
                        model, deployment, facts_folders, takes_recipe=takes_recipe
                    )
                    plans.append(plan)
                except (ConfigError, ModelFactsError, ModelConfigUnreadableError) as error:
                    problems.append(f"{model.name}: {error}")
    return EnginePlanReport(tuple(plans), tuple(problems))


def plan_deployment(
    model: ModelConfig,
    deployment: DeploymentConfig,
    facts_folders: Sequence[Path],
    *,
    takes_recipe: bool = False,
) -> EnginePlan:
    """The plan of each engine of a deployment, which has a slice.

    `takes_recipe`: with what others have published for it, where nothing is set by hand.

    Raises:
        ConfigError: tpu-inference would reject it or load it wrongly.
        ModelFactsError: the model's `config.json` has too little.
        ModelConfigUnreadableError: a file that was found is of no use.
    """
    assert deployment.slice is not None
    requirements = EngineRequirements(
        model=model.source,
        shape=deployment.slice.engine_shape,
        args=model.engine_args,
        env=model.engine_env,
        compile_cache=None if model.compile_cache is None else model.compile_cache.local_dir,
        num_slices=deployment.slice.num_slices,
        num_engines=deployment.slice.num_engines,
    )
    raw = find_model_config(model.source, facts_folders)
    facts = None if raw is None else model_facts(raw)
    if takes_recipe:
        return _plan_with_recipe(requirements, facts, model.name)
    return plan_engine(requirements, facts, model.name)


def _plan_with_recipe(
    requirements: EngineRequirements, facts: ModelFacts | None, path: str
) -> EnginePlan:
    """The plan with the recipe's values where nothing is set by hand; they name it as reason."""
    recipe, _ = _published(requirements)
    if isinstance(recipe, str):
        return plan_engine(requirements, facts, path)
    args = _new_in(recipe.args, requirements.args)
    env = _new_in(recipe.env, requirements.env)
    both = replace(
        requirements,
        args={**args, **requirements.args},
        env={**{name: str(value) for name, value in env.items()}, **requirements.env},
    )
    plan = plan_engine(both, facts, path)
    reason = f"{_RECIPE}{recipe.source}"

    def told(settings: tuple[Setting, ...], taken: Mapping[str, object]) -> tuple[Setting, ...]:
        return tuple(
            replace(each, reason=reason) if each.name in taken else each for each in settings
        )

    settings = plan.settings
    settings = replace(settings, args=told(settings.args, args), env=told(settings.env, env))
    return replace(plan, settings=settings)


def _new_in(recipe: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in recipe.items()
        if name not in given and name not in _NOT_TAKEN
    }


def plan_lines(plan: EnginePlan) -> Iterator[str]:
    """Yields the plan as lines for people."""
    requirements, settings = plan.requirements, plan.settings
    shape = requirements.shape
    hosts = f"{requirements.num_hosts} hosts" if requirements.num_hosts > 1 else "1 host"
    num_chips = requirements.num_slices * shape.num_chips
    yield f"{requirements.model} on {describe_slice(requirements)}: {num_chips} chips, {hosts}"
    yield "  vLLM's arguments"
    yield from map(_setting_line, settings.args)
    if settings.env:
        yield "  environment of every process, on every host"
        yield from map(_setting_line, settings.env)
    yield "  steps are padded to"
    yield f"    tokens    {', '.join(map(str, settings.token_buckets))}"
    yield f"    requests  {', '.join(map(str, settings.request_buckets))}"
    yield from _memory_lines(plan)
    yield from _published_lines(plan)
    yield from _snippet_lines(plan)
    if plan.divisions:
        yield "  engines that could share the slice (num_engines): expected, not measured"
        yield from map(_division_line, plan.divisions)
    if settings.notes:
        yield "  notes"
        yield from (f"    {note}" for note in settings.notes)


def plan_json(plan: EnginePlan) -> dict[str, Any]:
    """Returns the plan as JSON for programs."""
    settings = plan.settings
    budget = plan.budget
    recipe, figure = _published(plan.requirements)
    return {
        "model": plan.requirements.model,
        "slice": describe_slice(plan.requirements),
        "engine_args": settings.engine_args,
        "environment": settings.environment,
        "reasons": {setting.name: setting.reason for setting in (*settings.args, *settings.env)},
        "token_buckets": settings.token_buckets,
        "request_buckets": settings.request_buckets,
        "notes": settings.notes,
        "memory": None if budget is None else asdict(budget) | {"fits": budget.fits},
        "uncounted": plan.uncounted,
        "host_cache_bytes": plan.host_cache_bytes,
        "complaints": () if budget is None else budget.complaints,
        "doubts": () if budget is None else budget.doubts,
        "advice": plan.advice,
        "divisions": [asdict(each) for each in plan.divisions],
        "recipe": recipe if isinstance(recipe, str) else asdict(recipe),
        "published": figure if isinstance(figure, str) else _figure_json(figure),
    }


def _setting_line(setting: Setting) -> str:
    return f"    {f'{setting.name}={_text(setting.value)}':<{_NAME_WIDTH}}  {setting.reason}"


def _division_line(division: Division) -> str:
    part, tokens = division.part, division.cache_tokens
    chips = f"{part.num_chips} chip{'s' if part.num_chips > 1 else ''}"
    cache = f"{tokens} tokens in the cache of each, {division.num_engines * tokens} in all"
    return f"    {division.num_engines} of {chips} ({part.generation} {part.topology}): {cache}"


def _memory_lines(plan: EnginePlan) -> Iterator[str]:
    budget = plan.budget
    if budget is None:
        yield f"  memory: not counted, {plan.uncounted}"
        return
    yield "  memory of the fullest device: expected, not measured"
    yield from _budget_lines(budget)
    if budget.fits:
        longest = budget.cache_tokens // budget.max_model_len
        requests = f"{longest} requests of the longest kind ({budget.max_model_len} tokens)"
        yield f"  fits: {budget.cache_tokens} tokens in the cache, {requests}"
        yield from (f"    it may be too little: {doubt}" for doubt in budget.doubts)
        yield from _host_cache_lines(plan)
        return
    yield "  DOES NOT FIT"
    yield from (f"    {complaint}" for complaint in budget.complaints)
    yield "  what would fit"
    yield from (f"    {way}" for way in plan.advice or ("nothing that was tried",))


def _host_cache_lines(plan: EnginePlan) -> Iterator[str]:
    cache = plan.settings.host_cache
    if cache is not None:
        size = gib(plan.host_cache_bytes)
        yield f"  cache in the host's memory: {size} for {cache.tokens} tokens, expected"


def _snippet_lines(plan: EnginePlan) -> Iterator[str]:
    """Yields what of the plan is a recipe's, as it would stand in the file; else nothing."""
    sections = {"engine_args": plan.settings.args, "engine_env": plan.settings.env}
    found = {
        name: {each.name: each.value for each in settings if each.reason.startswith(_RECIPE)}
        for name, settings in sections.items()
    }
    written = {name: values for name, values in found.items() if values}
    if written:
        yield "  to start so, write into the model (it changes answers where it rounds to fp8)"
        for line in yaml.safe_dump(written, sort_keys=False).splitlines():
            yield f"    {line}"


def _published(
    requirements: EngineRequirements,
) -> tuple[Recipe | str, PublishedFigure | str]:
    """Returns what others have published for this model on these chips, or why there is nothing."""
    num_chips = requirements.num_slices * requirements.shape.num_chips
    where = requirements.model, requirements.shape.generation, num_chips
    return recipe_for(*where), published_for(*where)


def _figure_json(figure: PublishedFigure) -> dict[str, Any]:
    return asdict(figure) | {"tokens_per_s_per_chip": figure.tokens_per_s_per_chip}


def _published_lines(plan: EnginePlan) -> Iterator[str]:
    recipe, figure = _published(plan.requirements)
    yield "  published by others: read, not measured by us"
    if isinstance(recipe, str):
        yield f"    {recipe}"
    else:
        yield f"    recipe: {recipe.source}"
        planned = {**plan.settings.engine_args, **plan.settings.environment}
        for name, value in {**recipe.args, **recipe.env}.items():
            given = planned.get(name)
            here = "the default" if given is None else _text(given)
            here = "as planned" if given == value else f"planned: {here}"
            yield f"      {f'{name}={_text(value)}':<{_NAME_WIDTH}}  {here}"
        for each in recipe.throughput:
            yield (
                f"      {each.tokens_per_s_per_chip:g} output tokens per second and chip with"
                f" {each.concurrency} requests at once, {each.input_tokens} tokens in,"
                f" {each.output_tokens} out ({each.source})"
            )
    if isinstance(figure, str):
        yield f"    {figure}"
    else:
        yield (
            f"    {figure.requests_per_s:g} requests per second and slice, {figure.input_tokens}"
            f" tokens in, {figure.output_tokens} out: {figure.tokens_per_s_per_chip:.0f} output"
            f" tokens per second and chip, computed from these ({figure.source})"
        )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _budget_lines(budget: HbmBudget) -> Iterator[str]:
    rows = {
        "what programs get of it": budget.hbm_bytes,
        "weights": budget.weights_bytes,
        "key-value cache": budget.cache_bytes,
        "left for activations": budget.reserve_bytes,
        "of that a step needs, at a guess": budget.workspace_bytes,
    }
    for words, num_bytes in rows.items():
        yield f"    {gib(num_bytes):>12}  {words}"
    yield f"    {budget.kv_bytes_per_token / 1024:>8.1f} KiB  cache of one token"
