"""Checks a serve_config.yaml before anything starts (`slicewise config check`).

Owns the reading of the file and the report. Ray's schema has the fields of Serve,
`serving.config.application` those of the application.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
import yaml
from pydantic import BaseModel, ValidationError

from serving.artifacts.adapter_files import DEFAULT_MAX_RANK, adapter_complaints
from serving.artifacts.model_config_file import (
    ModelConfigUnreadableError,
    find_generation_config,
    find_model_config,
)
from serving.artifacts.model_source import resolve_file, resolve_source
from serving.config.api_keys import read_keys
from serving.config.application import (
    AppConfig,
    RolloutConfig,
    check_app_config,
    exposure_problem,
)
from serving.config.models import DeploymentConfig, ModelConfig
from serving.config.policy_rules import (
    bound_problems,
    objective_problems,
    policy_problems,
    settings_problems,
    shape_problems,
)
from serving.config.ray_settings import HAPROXY, HARD_STOP, RAY_SETTINGS
from serving.config.rules import mappings_in
from serving.config.schema import name_hint, path_text, shown
from serving.config.sections import load_yaml
from serving.config.slices import SliceConfig
from serving.config.vllm.vllm_args import VllmArgs, installed_vllm_args
from serving.config.vllm.vllm_rules import unbounded_media_problem
from serving.domain.errors import ConfigError, Problem, UnsupportedVllmError
from serving.domain.models.request_fields.refusals import ignored_defaults
from serving.domain.models.request_fields.rules import EngineFacts, Trait

IMPORT_PATH = "serving.app:build"

_PROBLEMS, _UNUSABLE = 1, 2
# HAProxy's time runs from the first new gateway, a drain from the last one. This is allowed for the
# time between them, which was 23 s for two gateways on 2 busy cores.
_SURGE_S = 120
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check: `problems` to correct; with none, the applications by name."""

    problems: tuple[Problem, ...] = ()
    applications: Mapping[str, AppConfig] = field(default_factory=dict)
    http_host: str = ""
    http_port: int = 8000


def check_command(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, metavar="FILE")
    ],
) -> None:
    """Check FILE, a serve_config.yaml: every problem, or a short summary."""
    try:
        vllm_args = installed_vllm_args()
        settings = load_yaml(file.read_text(encoding="utf-8"))
        report = check_serve_config(settings, vllm_args, os.environ)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        typer.echo(f"{file}: not readable as YAML: {error}", err=True)
        raise typer.Exit(_PROBLEMS) from error
    except UnsupportedVllmError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_UNUSABLE) from error
    if vllm_args is None:
        typer.echo(
            "note: vLLM is not installed here, so the names and values in engine_args and "
            "frontend_args were not checked",
            err=True,
        )
    problems = [
        *report.problems,
        *_keys_problems(report),
        *_adapter_problems(report),
        *_media_problems(report, vllm_args or VllmArgs({}, {})),
    ]
    if problems:
        for problem in problems:
            typer.echo(f"{file}: {problem}")
        raise typer.Exit(_PROBLEMS)
    for note in default_notes(report):
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{file}: ok")
    for line in summary_lines(report):
        typer.echo(line)


def check_serve_config(
    raw: object, vllm_args: VllmArgs | None, inherited: Mapping[str, str] = _NOTHING
) -> CheckReport:
    """Checks `raw` as Serve does, then our applications in it, then both together.

    `inherited` are variables of the user's own, which win over `RAY_SETTINGS` when Ray is started.
    """
    # Importing Ray Serve takes a second, which no other command should pay.
    from ray.serve.schema import (  # noqa: PLC0415
        HTTPOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    problems: list[Problem] = []
    applications: dict[str, AppConfig] = {}
    host: str | None = None
    port = 8000
    try:
        options = ServeDeploySchema.model_validate(raw).http_options
        host, port = options.host, options.port
    except ValidationError as error:
        problems += _serve_problems(error)
    if isinstance(raw, dict):
        problems += _unknown_keys("", raw, ServeDeploySchema)
        problems += _unknown_keys("http_options", raw.get("http_options"), HTTPOptionsSchema)
        for index, application in mappings_in(raw.get("applications")):
            problems += _unknown_keys(f"applications[{index}]", application, ServeApplicationSchema)
    ours = _our_applications(raw)
    for index, application in ours:
        path = f"applications[{index}].args"
        try:
            config = check_app_config(application.get("args", {}), vllm_args)
        except ConfigError as error:
            problems += [_under(path, problem) for problem in error.problems]
            continue
        applications[str(application.get("name", "default"))] = config
        problems += policy_problems(f"applications[{index}]", application, config)
        problems += settings_problems(f"applications[{index}]", application)
        problems += objective_problems(f"applications[{index}]", application, config)
        problems += shape_problems(f"applications[{index}]", application, config)
        problems += bound_problems(f"applications[{index}]", application, config)
        problems += _drain_problems(
            f"{path}.rollout", config.rollout, {**RAY_SETTINGS, **inherited}
        )
        exposure = exposure_problem(config.auth, host) if host is not None else None
        problems += [_under(path, exposure)] if exposure else []
    if not ours:
        problems.append(
            Problem("applications", "none is Slicewise's", f"needed: import_path {IMPORT_PATH}")
        )
    return CheckReport(tuple(problems), applications, host or "", port)


def _keys_problems(report: CheckReport) -> Iterator[Problem]:
    """Yields what is wrong with files of API keys, where they are on this machine."""
    for config in report.applications.values():
        file = config.auth.keys_file
        if file is None or not (path := resolve_file(file)).is_file():
            continue
        try:
            records = read_keys(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            yield Problem("auth.keys_file", str(error), "correct the file", file)
            continue
        served = {model.name for model in config.models}
        served |= {each.name for model in config.models for each in model.lora_adapters}
        for record in records:
            for name in sorted((record.models or frozenset()) - served):
                complaint = f"the key {record.name!r} is for a model that is not served"
                allowed = f"served: {', '.join(sorted(served))}"
                yield Problem("auth.keys_file", complaint, allowed, shown("models", name))


def _adapter_problems(report: CheckReport) -> Iterator[Problem]:
    """Yields what is wrong with folders of adapters, where they are on this machine."""
    for config in report.applications.values():
        for at, model in enumerate(config.models):
            rank = model.engine_args.get("max_lora_rank")
            max_rank = rank if isinstance(rank, int) else DEFAULT_MAX_RANK
            for number, adapter in enumerate(model.lora_adapters):
                folder = Path(resolve_source(adapter.path))
                if not folder.is_dir():
                    continue
                field = f"models[{at}].lora_adapters[{number}].path"
                for complaint, allowed in adapter_complaints(folder, max_rank):
                    yield Problem(field, complaint, allowed, shown("path", adapter.path))


def _media_problems(report: CheckReport, vllm_args: VllmArgs) -> Iterator[Problem]:
    """Yields multi-modal models, where their `config.json` is at hand, that may fetch anything."""
    for config in report.applications.values():
        for index, model in enumerate(config.models):
            try:
                takes_media = _takes_media(model, vllm_args)
            except ModelConfigUnreadableError as error:
                yield Problem(f"models[{index}].source", str(error), "correct the file")
                continue
            if takes_media:
                problem = unbounded_media_problem(f"models[{index}].engine_args", model.engine_args)
                yield from [problem] if problem else []


def _takes_media(model: ModelConfig, vllm_args: VllmArgs) -> bool:
    """Returns whether a model's `config.json` says so; `False` where it cannot be had.

    Gateways ask vLLM, which has the model's class, when they start.
    """
    found = find_model_config(model.source) or {}
    architectures = found.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    has_encoder = "vision_config" in found or "audio_config" in found
    return has_encoder or any(each in vllm_args.multimodal for each in named)


def default_notes(report: CheckReport) -> Iterator[str]:
    """Yields the defaults of models that their engines do not honour, where they are at hand.

    They are no problem of the file: such a model is served, with less than its authors asked for.
    """
    for config in report.applications.values():
        for index, model in enumerate(config.models):
            speculates = model.engine_args.get("speculative_config") is not None
            traits = frozenset({Trait.SPECULATES} if speculates else ())
            for ignored in ignored_defaults(
                EngineFacts(model.engine, traits), _generation_defaults(model)
            ):
                yield (
                    f"models[{index}].source: {model.source} has {ignored.field} {ignored.value} "
                    f"by default; {ignored.reason}"
                )


def _generation_defaults(model: ModelConfig) -> dict[str, object]:
    """Returns the defaults of a model's requests, as vLLM finds them."""
    source = model.engine_args.get("generation_config", "auto")
    found: dict[str, object] = {}
    if isinstance(source, str) and source != "vllm":
        with contextlib.suppress(ModelConfigUnreadableError):
            found = find_generation_config(model.source if source == "auto" else source) or {}
    overriding = model.engine_args.get("override_generation_config")
    return found | (overriding if isinstance(overriding, dict) else {})


def summary_lines(report: CheckReport) -> Iterator[str]:
    """Yields lines on models, deployments, what they request of Ray, and who may use them."""
    for name, config in report.applications.items():
        yield f"application {name}"
        for model in config.models:
            adapters = ", ".join(adapter.name for adapter in model.lora_adapters) or "none"
            yield f"  model        {model.name} (engine {model.engine}, adapters: {adapters})"
            for deployment in model.deployments:
                wanted = ""
                if deployment.slice is not None:
                    wanted = f", each on {_slice_text(deployment.slice)}"
                yield (
                    f"  deployment   {model.deployment_name(deployment)} "
                    f"({_replicas_text(deployment)}{wanted})"
                )
        yield f"  gateway      {_gateways_text(config)}"
        chips = f"{config.num_chips} chips" if config.num_chips else "no chips"
        yield f"  asked of Ray {config.num_cpus:g} CPUs, {chips}"
        yield f"  API keys     {_keys_text(config, report.http_host)}"


def _slice_text(wanted: SliceConfig) -> str:
    shape = wanted.shape
    hosts = f"{shape.num_hosts} hosts" if shape.num_hosts > 1 else "1 host"
    kind = f"{shape.generation} {shape.topology} of {hosts}"
    if wanted.num_engines > 1:
        return f"a slice {kind}, shared by {wanted.num_engines} engines"
    return f"a slice {kind}" if wanted.num_slices == 1 else f"{wanted.num_slices} slices {kind}"


def _replicas_text(deployment: DeploymentConfig) -> str:
    if not deployment.is_autoscaled:
        return f"replicas: {deployment.replicas}"
    return f"replicas: {deployment.min_replicas} to {deployment.max_replicas}"


def _gateways_text(config: AppConfig) -> str:
    count = config.gateway_count
    by_rule = f" (auto: {count.reason})" if config.gateway.replicas == "auto" else ""
    return f"replicas: {count.number}{by_rule}"


def _keys_text(config: AppConfig, http_host: str) -> str:
    if config.auth.keys_file is not None:
        return f"on, from the file {config.auth.keys_file}"
    if config.auth.keys_env is not None:
        return f"on, from the environment variable {config.auth.keys_env}"
    return f"off: everybody who reaches {http_host} may ask"


def _our_applications(raw: object) -> list[tuple[int, Mapping[str, object]]]:
    """Returns the raw applications that are ours, with their positions."""
    applications = mappings_in(raw.get("applications")) if isinstance(raw, dict) else []
    return [(at, entry) for at, entry in applications if entry.get("import_path") == IMPORT_PATH]


def _drain_problems(
    path: str, rollout: RolloutConfig, variables: Mapping[str, str]
) -> Iterator[Problem]:
    """Yields a drain that HAProxy would not wait for; `variables` are those that start Ray."""
    if variables[HAPROXY] != "1":
        return
    text = variables[HARD_STOP]
    if not text.isdecimal():
        yield Problem(HARD_STOP, "Ray would not start", "allowed: whole seconds", repr(text))
        return
    longest_s = int(text) - _SURGE_S
    drains_s = {"gateway_drain_s": rollout.gateway_drain_s, "drain_s": rollout.drain_s}
    for name, drain_s in drains_s.items():
        if drain_s > longest_s:
            complaint = f"HAProxy cuts streams {text} s after the first change of gateways"
            allowed = f"allowed: at most {max(0, longest_s)}, which is {HARD_STOP} less {_SURGE_S}"
            yield Problem(f"{path}.{name}", complaint, allowed, f"{drain_s:g}")


def _under(path: str, problem: Problem) -> Problem:
    below = "" if problem.path == "args" else f".{problem.path}"
    return Problem(f"{path}{below}", problem.complaint, problem.allowed, problem.value)


def _unknown_keys(path: str, raw: object, model: type[BaseModel]) -> Iterator[Problem]:
    """Yields unknown keys. Serve drops them, so a misspelt `host` would mean every address."""
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if name not in model.model_fields:
            at = f"{path}.{name}".removeprefix(".")
            hint = name_hint(str(name), model.model_fields)
            yield Problem(at, "unknown key", hint, shown(str(name), value))


def _serve_problems(error: ValidationError) -> Iterator[Problem]:
    for detail in error.errors(include_url=False, include_context=False):
        name = str(detail["loc"][-1]) if detail["loc"] else ""
        value = None if detail["type"] == "missing" else shown(name, detail["input"])
        yield Problem(path_text(detail["loc"]), detail["msg"], "see Ray Serve's config", value)
