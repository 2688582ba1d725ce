"""Resolves a TPU engine on the first host of its slice: settings and memory, before any start.

Owns when a plan is made and how it is used. This runs on that host because the model's files are
reached from there. It runs before the engine host because variables that are read at import must be
set when its process and those of its workers begin. Does not own the plan (`serving.tpu`).
"""

import json
import logging
import os
from dataclasses import replace
from typing import Any

from serving.artifacts.model_config_file import ModelConfigUnreadableError, find_model_config
from serving.artifacts.object_store.address import is_bucket, open_store
from serving.artifacts.object_store.store import StoreError
from serving.artifacts.weights.revision import config_digest, model_revision
from serving.domain.errors import ConfigError
from serving.engine.spec import EngineSpec
from serving.engine.tpu.compile_cache import (
    HostFacts,
    program_variables,
    versions_here,
    with_programs,
)
from serving.tpu.model_facts import ModelFacts, ModelFactsError, model_facts
from serving.tpu.plan import EnginePlan, ensure_fits, plan_engine
from serving.tpu.requirements import EngineRequirements

logger = logging.getLogger(__name__)


def resolve_settings(spec: EngineSpec, model_config: dict[str, Any] | None) -> EngineSpec:
    """Returns the engine with everything filled in that follows from its slice and its model.

    `model_config` is the model's parsed `config.json`; `None` means that it cannot be had. Then
    nothing that depends on the model is decided or checked.

    Raises:
        ValueError: tpu-inference would reject it or load it wrongly, or it does not fit. The
            message names what would work. Do not retry.
    """
    assert spec.slice is not None
    assert spec.tpu is not None
    requirements = EngineRequirements(
        model=spec.source,
        shape=spec.slice.engine_shape,
        args=spec.engine_args,
        env=spec.engine_env,
        compile_cache=None if spec.tpu.compile_cache is None else spec.tpu.compile_cache.local_dir,
        num_slices=spec.slice.num_slices,
        num_engines=spec.slice.num_engines,
    )
    try:
        plan = plan_engine(requirements, _facts(spec, model_config), spec.model)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    _log(spec, plan)
    ensure_fits(plan)
    args: dict[str, Any] = plan.settings.engine_args  # vLLM's, JSON values all of them
    return replace(spec, engine_args=args, engine_env=plan.settings.environment)


def resolve_settings_here(spec: EngineSpec) -> EngineSpec:
    """Resolves settings as `resolve_settings`, with the `config.json` and versions of this host.

    Raises:
        ValueError: see `resolve_settings`.
    """
    config = _model_config(spec.source)
    resolved = resolve_settings(spec, config)
    # Entry point of a task: the pod's variables that concern programs are read here, once.
    facts = HostFacts(
        revision=model_revision(spec.source, spec.engine_args),
        config=config_digest(config),
        versions=versions_here(),
        environment=program_variables(os.environ),
    )
    return with_programs(resolved, facts)


def _model_config(source: str) -> dict[str, Any] | None:
    if is_bucket(source):
        return _config_in_bucket(source)
    try:
        found = find_model_config(source)
        if found is None and _fetch(source):
            found = find_model_config(source)
    except ModelConfigUnreadableError as error:
        logger.warning("model_config_unreadable source=%s error=%r", source, str(error))
        return None
    return found


def _config_in_bucket(source: str) -> dict[str, Any] | None:
    folder, _, last = source.rstrip("/").rpartition("/")
    try:
        found = json.loads(open_store(folder).get(f"{last}/config.json"))
    except (StoreError, ValueError) as error:
        logger.warning("model_config_not_fetched source=%s error=%r", source, str(error))
        return None
    return found if isinstance(found, dict) else None


def _fetch(source: str) -> bool:
    """Fetches the file of a Hugging Face id into the cache, where the engine finds it again."""
    # Imported here because it takes a second, which a host with a model folder does not spend.
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    try:
        hf_hub_download(source, "config.json")
    except (OSError, ValueError) as error:
        # Unreachable, gated or no such id: the engine reports which, if it cannot have it either.
        logger.warning("model_config_not_fetched source=%s error=%r", source, str(error))
        return False
    return True


def _facts(spec: EngineSpec, model_config: dict[str, Any] | None) -> ModelFacts | None:
    if model_config is None:
        return None
    try:
        return model_facts(model_config)
    except ModelFactsError as error:
        logger.warning("model_facts_unknown model=%s error=%r", spec.model, str(error))
        return None


def _log(spec: EngineSpec, plan: EnginePlan) -> None:
    for setting in (*plan.settings.args, *plan.settings.env):
        logger.info(
            "engine_setting model=%s name=%s value=%r reason=%r",
            spec.model, setting.name, setting.value, setting.reason,
        )  # fmt: skip
    for note in plan.settings.notes:
        logger.info("engine_note model=%s note=%r", spec.model, note)
    budget = plan.budget
    if budget is None:
        logger.warning("engine_memory model=%s uncounted=%r", spec.model, plan.uncounted)
        return
    logger.info(
        "engine_memory model=%s hbm_bytes=%d weights_bytes=%d cache_bytes=%d cache_tokens=%d",
        spec.model, budget.hbm_bytes, budget.weights_bytes, budget.cache_bytes, budget.cache_tokens,
    )  # fmt: skip
