"""The compiled programs of one engine on TPU: their key, and how a host pulls and pushes them.

Owns what connects an engine's settings to the cache of programs
(`serving.artifacts.compile_cache`), and the work on one host of the slice. Does not own the time
of that work, nor the choice of hosts (`slices.compile_cache_sync`).
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from serving.artifacts.compile_cache.key import CacheKey, ProgramFacts, cache_key, changes_programs
from serving.artifacts.compile_cache.layout import KeyPlace
from serving.artifacts.compile_cache.local_folder import LocalFolder
from serving.artifacts.compile_cache.pull import pull
from serving.artifacts.compile_cache.push import Writer, push
from serving.artifacts.compile_cache.report import Damage, PullReport, PushReport, TransferOutcome
from serving.artifacts.object_store.address import open_store
from serving.artifacts.object_store.store import ObjectStore, StoreError
from serving.engine.spec import EngineSpec, Programs
from serving.tpu.rules import JAX_PROGRAM_FOLDER, PROGRAM_FOLDER

logger = logging.getLogger(__name__)

# The packages that compile, and those that decide what is compiled.
_PACKAGES = ("vllm", "vllm-tpu", "tpu-inference", "jax", "jaxlib", "libtpu", "flax", "torchax")
_Report = TypeVar("_Report", PullReport, PushReport)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts of an engine's programs that the first host knows. See `ProgramFacts`."""

    revision: str | None
    config: str | None
    versions: Mapping[str, str]
    environment: Mapping[str, str]


def with_programs(spec: EngineSpec, facts: HostFacts) -> EngineSpec:
    """Returns the resolved engine with key and folder of its programs, if it has a cache. Pure."""
    if spec.tpu is None or spec.tpu.compile_cache is None or spec.slice is None:
        return spec
    shape, cache = spec.slice.engine_shape, spec.tpu.compile_cache
    key = cache_key(
        ProgramFacts(
            source=spec.source,
            revision=facts.revision,
            config=facts.config,
            versions=facts.versions,
            generation=str(shape.generation),
            topology=shape.topology,
            chips_per_host=shape.chips_per_host,
            num_slices=spec.slice.num_slices,
            args=spec.engine_args,
            env=dict(facts.environment) | dict(spec.engine_env),
        )
    )
    folder = f"{spec.engine_env.get(PROGRAM_FOLDER, cache.local_dir)}/{key.digest}"
    return replace(
        spec,
        engine_env=dict(spec.engine_env) | {PROGRAM_FOLDER: folder, JAX_PROGRAM_FOLDER: folder},
        programs=Programs(key.parts, folder, cache),
    )


def versions_here() -> dict[str, str]:
    """Returns the versions of the packages that programs depend on; absent ones are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def program_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that change programs; the others are not written down."""
    return {name: value for name, value in environment.items() if changes_programs(name)}


def pull_here(programs: Programs, log: Mapping[str, JsonValue]) -> PullReport:
    """Pulls the programs to this host and logs one line; failures are in the report."""
    key = CacheKey(programs.parts)

    def move(store: ObjectStore) -> PullReport:
        place = KeyPlace(key.family, key.digest)
        folder = LocalFolder(Path(programs.folder))
        report = pull(store, place, folder, programs.cache.budget_s, time.monotonic)
        if report.num_known:
            # `prune` goes by this mark. Without the right to write it, programs are still of use.
            try:
                store.put(place.used, b"")
            except StoreError as error:
                logger.info("programs_use_not_noted key=%s error=%r", key.digest, str(error))
        return report

    report = _guarded(programs, move, PullReport)
    logger.info("programs_pulled key=%s %s %s", key.digest, _pairs(log), report)
    return report


def push_here(
    programs: Programs, damage: tuple[Damage, ...], log: Mapping[str, JsonValue]
) -> PushReport:
    """Pushes what the store lacks and logs one line; failures are in the report."""
    key = CacheKey(programs.parts)

    def move(store: ObjectStore) -> PushReport:
        writer = Writer(_pairs(log), time.time, time.monotonic)
        folder = LocalFolder(Path(programs.folder))
        return push(store, key, folder, writer, programs.cache.budget_s, damage)

    report = _guarded(programs, move, PushReport)
    logger.info("programs_pushed key=%s %s %s", key.digest, _pairs(log), report)
    return report


def _guarded(
    programs: Programs,
    move: Callable[[ObjectStore], _Report],
    failed: Callable[[TransferOutcome, str, float], _Report],
) -> _Report:
    """Moves programs; reports also a store that cannot be opened and a disk that fails."""
    started_s = time.monotonic()
    try:
        return move(open_store(programs.cache.store))
    except (ValueError, OSError) as error:
        return failed(TransferOutcome.UNREACHABLE, str(error), time.monotonic() - started_s)


def _pairs(log: Mapping[str, JsonValue]) -> str:
    return " ".join(f"{name}={value}" for name, value in log.items())
