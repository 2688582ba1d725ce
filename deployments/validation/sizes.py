"""Checks that the hosts of a worker group have room for the models that are loaded on them.

Holds what a model needs (`serving.tpu.host_needs`) against the disk, the local SSDs and the memory
that the manifests give its hosts. A model whose size is not known is passed over, with a note. Pure
but for `model_sizes`, which reads files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments.manifests.names import DATA_FOLDER
from deployments.validation.documents import (
    Folder,
    Json,
    mapping,
    named,
    ray_clusters,
    sequence,
    value_at,
)
from deployments.validation.groups import FoundGroup, slice_groups_in
from deployments.validation.serving import application_of, hosts_of
from serving.artifacts.model_config_file import (
    ModelConfigUnreadableError,
    find_model_config,
    find_weights_index,
)
from serving.config.models import ModelConfig
from serving.config.slice_settings import slice_spec
from serving.config.slice_spec import slice_request
from serving.config.slices import SliceConfig
from serving.domain.errors import ConfigError, Problem
from serving.domain.supply.found import find_slices, match_slices
from serving.domain.topology import GIB
from serving.tpu.hbm import gib
from serving.tpu.host_needs import HostNeeds, host_needs, stored_bytes
from serving.tpu.machines import (
    DEFAULT_BOOT_DISK_GB,
    boot_disk_gb_for,
    pods_boot_disk_bytes,
    pods_local_ssd_bytes,
)
from serving.tpu.model_facts import ModelFacts, ModelFactsError, model_facts
from serving.tpu.model_rules import is_jax_model
from serving.tpu.offload import has_host_cache
from serving.tpu.plan import plan_engine
from serving.tpu.requirements import EngineRequirements
from serving.tpu.settings import sharding_of


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's stored weights, in bytes, and what its `config.json` says."""

    weights_bytes: int
    facts: ModelFacts


# By source; `None` where the size is not known.
SizeOf = Callable[[str], ModelSize | None]


def model_sizes(folders: Sequence[Path]) -> SizeOf:
    """Returns how the size of a source is found here: its own files, the cache, files of facts."""

    def size_of(source: str) -> ModelSize | None:
        try:
            raw = find_model_config(source, folders)
            facts = None if raw is None else model_facts(raw)
        except (ModelConfigUnreadableError, ModelFactsError):
            return None
        weights = stored_bytes(facts, find_weights_index(source))
        if weights is None or facts is None:
            return None
        return ModelSize(weights, facts)

    return size_of


def size_problems(folder: Folder, size_of: SizeOf) -> Iterator[Problem]:
    """Yields every model that does not fit on the disk or in the memory of its group's hosts."""
    for group, model, slices in _models_on_groups(folder):
        size = size_of(model.source)
        if size is not None:
            needs = _needs(model, size, slices)
            yield from _group_problems(folder, group, model, needs)


def unknown_sizes(folder: Folder, size_of: SizeOf) -> list[str]:
    """Returns the sources on TPU hosts of which nothing can be said."""
    sources = {model.source for _, model, _ in _models_on_groups(folder)}
    return sorted(source for source in sources if size_of(source) is None)


def _needs(model: ModelConfig, size: ModelSize, slices: Sequence[SliceConfig]) -> HostNeeds:
    engines = [_requirements(model, each) for each in slices]
    return host_needs(
        model.source,
        model.engine_args,
        size.weights_bytes,
        is_torch=not all(
            is_jax_model(each, size.facts, sharding_of(each, size.facts)) for each in engines
        ),
        is_mounted=model.source.startswith(f"{DATA_FOLDER}/"),
        num_engines=max(each.engines_per_host for each in slices),
        cache_bytes=max(_cache_bytes(each, size.facts) for each in engines),
    )


def _requirements(model: ModelConfig, wanted: SliceConfig) -> EngineRequirements:
    return EngineRequirements(
        model.source,
        wanted.engine_shape,
        model.engine_args,
        model.engine_env,
        num_slices=wanted.num_slices,
        num_engines=wanted.num_engines,
    )


def _cache_bytes(requirements: EngineRequirements, facts: ModelFacts) -> int:
    """Returns what one engine's KV cache in its host's memory takes; 0 without one."""
    if not has_host_cache(requirements.args):
        return 0
    try:
        return plan_engine(requirements, facts).host_cache_bytes
    except ConfigError:
        return 0  # what cannot start is told by who checks the engine


def _models_on_groups(
    folder: Folder,
) -> Iterator[tuple[FoundGroup, ModelConfig, list[SliceConfig]]]:
    """Yields each model with a group that it may run on, and the slices that it has there."""
    for manifest, path, cluster in ray_clusters(folder):
        app = application_of(folder, manifest)
        if app is None:
            continue
        for group in slice_groups_in(manifest, path, cluster):
            hosts = hosts_of(group)
            for model in app.models:
                found = [
                    each.slice
                    for each in model.deployments
                    if each.slice is not None
                    and (spec := slice_spec(app, model, each)) is not None
                    and match_slices(find_slices(hosts), slice_request(spec)).free
                ]
                if model.is_on_tpu and found:
                    yield group, model, found


def _group_problems(
    folder: Folder, group: FoundGroup, model: ModelConfig, needs: HostNeeds
) -> Iterator[Problem]:
    volume = named(sequence(group.pod, "volumes"), "cache")
    empty = mapping(volume, "emptyDir")
    in_memory = empty.get("medium") == "Memory"
    memory = _bytes(
        value_at(group.pod, "containers", 0, "resources", "limits", "memory"),
    )
    wanted = needs.memory_bytes + (needs.disk_bytes if in_memory else 0)
    words = f"{model.name} needs {gib(wanted)} while it loads ({needs.reason})"
    if memory is not None and wanted > memory:
        field = "template.spec.containers[0].resources.limits.memory"
        allowed = f"needed: {-(-wanted // GIB)}Gi (cluster.host.memory_gib_per_chip), or streaming"
        yield group.problem(field, words, allowed, f"{memory // GIB}Gi")
    if in_memory or not needs.disk_bytes:
        return
    room = _disk_room(_storage(folder, group))
    if room is not None and needs.disk_bytes > room:
        words = f"{model.name} needs {gib(needs.disk_bytes)} of disk ({needs.reason})"
        size = f"cluster.host.boot_disk.size_gb of {boot_disk_gb_for(needs.disk_bytes)}"
        allowed = f"needed: {size}, local SSDs, or weights in a bucket"
        found = f"{gib(room)} that GKE leaves pods"
        yield group.problem("template.spec.volumes[cache]", words, allowed, found)


def _storage(folder: Folder, group: FoundGroup) -> Json | None:
    """The storage of the rule that makes the group's hosts; `None` where pools are your own."""
    for manifest in folder.of_kind("ComputeClass"):
        if manifest.name == group.name:
            rule = mapping(manifest.body, "spec", "priorities", 0)
            return None if "nodepools" in rule else mapping(rule, "storage")
    return None


def _disk_room(storage: Mapping[str, object] | None) -> int | None:
    if storage is None:
        return None
    ssds = storage.get("localSSDCount")
    if isinstance(ssds, int):
        return pods_local_ssd_bytes(ssds)
    size_gb = storage.get("bootDiskSize", DEFAULT_BOOT_DISK_GB)
    return pods_boot_disk_bytes(size_gb) if isinstance(size_gb, int) else None


def _bytes(quantity: object) -> int | None:
    """Returns a quantity in Gi, as ours are written; `None` for any other."""
    text = str(quantity)
    return int(text[:-2]) * GIB if text.endswith("Gi") and text[:-2].isdecimal() else None
