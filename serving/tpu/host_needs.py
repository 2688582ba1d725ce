"""What a model needs of each host while its weights are loaded: disk and memory.

Owns that arithmetic. Counts only what is known: a size is read from the index beside the weights,
or counted from `config.json`. What the host has is the caller's to know. Expected, not measured.
Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.artifacts.weights.sources import STREAMER, is_streamed
from serving.domain.topology import GIB
from serving.tpu.hbm import Sharding, gib, weight_bytes
from serving.tpu.model_facts import ModelFacts

# Beside weights: images (vllm-tpu's layers have some 8 GB unpacked), logs, compiled programs. A
# guess of ours.
_DISK_OF_OTHERS_BYTES = 20 * GIB
# Beside weights: Ray, the engine's own Python processes, tokenizers. A guess of ours.
_MEMORY_OF_OTHERS_BYTES = 16 * GIB
# Of them, the processes of each further engine on the host. A guess of ours.
_MEMORY_OF_ENGINE_BYTES = 8 * GIB
# Loaders that pass a checkpoint on in pieces. Source: tpu-inference 0.32.0
# `models/vllm/vllm_model_wrapper.py` and `models/common/model_loader.py`, read 2026-11-22.
_STREAMERS = (STREAMER, "runai_streamer_sharded", "tpu_streaming_loader")


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """What one model needs of each of its hosts, in bytes, and how it was found.

    `disk_bytes` of 0: its weights pass the disk by. `memory_bytes` are needed while it loads, and
    of them those of a KV cache as long as it serves.
    """

    weights_bytes: int
    disk_bytes: int
    memory_bytes: int
    reason: str


def stored_bytes(facts: ModelFacts | None, index: Mapping[str, object] | None) -> int | None:
    """Returns the size of a model's stored weights; `None` if neither source tells it.

    `index` is a parsed `model.safetensors.index.json`, whose total is exact.
    """
    metadata = index.get("metadata") if index is not None else None
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, int | float) and total > 0:
        return int(total)
    if facts is None or not facts.is_countable:
        return None
    return weight_bytes(facts, Sharding(tensor=1))


def host_needs(
    source: str,
    args: Mapping[str, object],
    weights_bytes: int,
    *,
    is_torch: bool,
    is_mounted: bool,
    num_engines: int = 1,
    cache_bytes: int = 0,
) -> HostNeeds:
    """Returns what a model of that size needs of each host, which has `num_engines` of it.

    `is_torch`: it is loaded as a torch model, the whole checkpoint first into the host's memory
    (source: as of the loaders above). `is_mounted`: the source is a folder that is not on the
    host's own disk. `cache_bytes`: of the KV cache that each engine keeps in the host's memory, 0
    without one.
    """
    passes_disk = is_mounted or is_streamed(source)
    streams = is_streamed(source) or args.get("load_format") in _STREAMERS
    whole = is_torch and not streams
    words = [f"weights of {gib(weights_bytes)}"]
    words.append("read from where they are" if passes_disk else "downloaded to each host")
    words.append("the whole checkpoint in memory at once" if whole else "loaded in pieces")
    if num_engines > 1:
        words.append(f"by each of {num_engines} engines")
    others_bytes = _MEMORY_OF_OTHERS_BYTES + (num_engines - 1) * _MEMORY_OF_ENGINE_BYTES
    if cache_bytes:
        words.append(f"a KV cache of {gib(cache_bytes)} for each engine")
        others_bytes += num_engines * cache_bytes
    return HostNeeds(
        weights_bytes,
        0 if passes_disk else weights_bytes + _DISK_OF_OTHERS_BYTES,
        others_bytes + (num_engines * weights_bytes if whole else 0),
        ", ".join(words),
    )
