"""Turns a slice and a model into vLLM's arguments and environment, each with its reason.

Owns that translation for vllm-tpu and tpu-inference 0.32.0. Does not own what is refused (`rules`,
`model_rules`), nor whether it fits (`hbm`). Pure: the same requirements give the same settings.

Values that the configuration sets by hand are kept, with "set by hand" as their reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serving.artifacts.weights.sources import STREAMER, is_streamed
from serving.domain.errors import ConfigError
from serving.domain.topology import SliceShape, parallelism_choices
from serving.tpu.features import untried_notes
from serving.tpu.hbm import MemoryRequirements, Sharding
from serving.tpu.model_facts import ModelFacts
from serving.tpu.model_rules import (
    AUTO_TORCH,
    model_problems,
    needs_torch_model,
    shards_more_than_heads,
)
from serving.tpu.offload import (
    CONNECTOR_MODULE,
    HostCache,
    has_host_cache,
    host_cache,
    host_cache_env,
)
from serving.tpu.requirements import EngineRequirements, count, is_on, section
from serving.tpu.rules import (
    JAX_PROGRAM_FOLDER,
    MODEL_IMPL,
    NEW_DESIGN,
    PROGRAM_FOLDER,
    argument_problems,
)

BY_HAND = "set by hand"

_TENSOR, _PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
_DEFAULT_UTILIZATION = 0.9
_DEFAULT_SEQS = 256
_DEFAULT_BATCHED = 2048
# The smallest buckets. Source: tpu-inference 0.32.0 `envs.py` and `runner/utils.py`, read
# 2026-11-21.
_MIN_TOKEN_BUCKET, _MIN_REQUEST_BUCKET = 16, 8


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one argument or variable, and its reason."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings that one engine on TPU is started with.

    `token_buckets` and `request_buckets` are the sizes of a step that warm-up compiles programs
    for, per copy of the attention. `notes` are what an operator should know; none stops a start.
    `host_cache` is what it keeps in the memory of its host, `None` if nothing.
    """

    args: tuple[Setting, ...]
    env: tuple[Setting, ...]
    sharding: Sharding
    memory: MemoryRequirements
    token_buckets: tuple[int, ...]
    request_buckets: tuple[int, ...]
    notes: tuple[str, ...]
    host_cache: HostCache | None = None

    @property
    def engine_args(self) -> dict[str, object]:
        """The engine arguments of vLLM by their Python names."""
        return {setting.name: setting.value for setting in self.args}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of every process of the engine, on every host."""
        return {setting.name: str(setting.value) for setting in self.env}


def engine_settings(
    requirements: EngineRequirements, facts: ModelFacts | None, path: str = "model"
) -> EngineSettings:
    """Returns the settings of one engine; `path` names the model in a refusal.

    `facts` of `None` (no `config.json` at hand) leaves out the settings that depend on the model.

    Raises:
        ConfigError: tpu-inference would reject this or load it wrongly; it names what works.
    """
    sharding = sharding_of(requirements, facts)
    problems = list(argument_problems(path, requirements))
    if facts is not None and not problems:
        problems += model_problems(path, requirements, facts, sharding)
    if problems:
        raise ConfigError(problems)
    args = tuple(_by_hand_or(requirements.args, _args(requirements, facts, sharding)))
    env = tuple(_by_hand_or(requirements.env, _env(requirements, facts, sharding)))
    values = {setting.name: setting.value for setting in args}
    host = host_cache(values, {setting.name: str(setting.value) for setting in env})
    memory = _memory(values, facts, 0 if host is None else host.staging_tokens)
    return EngineSettings(
        args=args,
        env=env,
        sharding=sharding,
        memory=memory,
        token_buckets=token_buckets(memory.max_num_batched_tokens, requirements.env),
        request_buckets=request_buckets(memory.max_num_seqs),
        notes=tuple(_notes(requirements, facts, sharding)),
        host_cache=host,
    )


def sharding_of(requirements: EngineRequirements, facts: ModelFacts | None) -> Sharding:
    """Returns how the model is laid over the devices of its slice."""
    shape, args, strategy = requirements.shape, requirements.args, requirements.strategy
    stages = count(args, _PIPELINE) or 1
    tensor = count(strategy, "tensor_parallelism") or count(args, _TENSOR)
    tensor = tensor or max(1, _tensor_for(shape, stages) // requirements.data_parallel)
    groups = 1
    if strategy.get("enable_dp_attention") is True or (facts is not None and facts.is_mla):
        groups = count(strategy, "attn_dp_size") or _derived_groups(tensor, facts)
    return Sharding(tensor, stages, groups, requirements.copies)


def token_buckets(max_num_batched_tokens: int, env: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the token counts that steps are padded to: doubling, then by the gap if set."""
    least = int(env.get("MIN_TOKEN_BUCKET", _MIN_TOKEN_BUCKET))
    gap = int(env.get("VLLM_TPU_BUCKET_PADDING_GAP", 0))
    last = -(-max_num_batched_tokens // least) * least
    sizes, size = {last}, least
    while size < last:
        sizes.add(size)
        size = size + gap if gap and size >= gap else 2 * size
    return tuple(sorted(sizes))


def request_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the request counts that steps are padded to: doubling, and the most there can be."""
    most = max(max_num_seqs, _MIN_REQUEST_BUCKET)
    sizes, size = {most}, _MIN_REQUEST_BUCKET
    while size < most:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


# -- arguments --


def _args(
    requirements: EngineRequirements, facts: ModelFacts | None, sharding: Sharding
) -> Iterator[Setting]:
    shape = requirements.shape
    devices = f"{shape.num_devices} devices of a {shape.generation} {shape.topology} slice"
    slices = "the whole slice" if requirements.num_slices == 1 else "each whole slice"
    if shape.devices_per_chip > 1:
        devices += f" ({shape.num_chips} chips of {shape.devices_per_chip})"
    num_parts = max(sharding.pipeline, requirements.data_parallel)
    share = "all" if num_parts == 1 else f"one of {num_parts} parts of the"
    yield Setting(_TENSOR, sharding.tensor, f"{share} {devices} share each layer")
    yield Setting(
        _PIPELINE,
        sharding.pipeline,
        f"one stage over {slices}: the interconnect joins all its chips",
    )
    if requirements.num_slices > 1:
        yield Setting(
            "data_parallel_size",
            requirements.num_slices,
            "each slice holds the whole model and its own requests: between slices there is the "
            "data-centre network only",
        )
    if facts is not None:
        yield Setting("max_model_len", facts.max_model_len, "the model's own context")
    yield Setting(
        "max_num_seqs",
        _DEFAULT_SEQS,
        "vLLM's own default, written down so that gateway, budget and buckets agree",
    )
    yield Setting(
        "max_num_batched_tokens",
        _DEFAULT_BATCHED,
        "what vLLM 0.32.0 takes on TPU (its table by chip name is never matched), a power of two "
        "so that the last bucket is used whole",
    )
    yield Setting(
        "gpu_memory_utilization",
        _DEFAULT_UTILIZATION,
        "the cache takes this share less the weights, unmeasured; the rest is for activations",
    )
    if is_streamed(requirements.model):
        reason = "streamed from the bucket into memory, past the disk"
        yield Setting("load_format", STREAMER, reason)
    if has_host_cache(requirements.args):
        given = section(requirements.args, "kv_transfer_config")
        yield Setting(
            "kv_transfer_config",
            {"kv_connector_module_path": CONNECTOR_MODULE, "kv_role": "kv_both", **given},
            "where vLLM finds the connector, and that one engine both keeps and finds",
        )
    if facts is not None and facts.is_multimodal:
        reason = "tpu-inference cannot split a multimodal input over steps"
        yield Setting("disable_chunked_mm_input", True, reason)  # noqa: FBT003 - a value
    if facts is not None and facts.is_mla:
        yield Setting(
            "additional_config",
            _with_attention_data(requirements),
            "models with latent attention run with attention data parallelism only",
        )


def _with_attention_data(requirements: EngineRequirements) -> dict[str, object]:
    given = section(requirements.args, "additional_config")
    sharding = section(given, "sharding")
    strategy = dict(requirements.strategy) | {"enable_dp_attention": True}
    return dict(given) | {"sharding": dict(sharding) | {"sharding_strategy": strategy}}


# -- environment --


def _env(
    requirements: EngineRequirements, facts: ModelFacts | None, sharding: Sharding
) -> Iterator[Setting]:
    if requirements.num_hosts > 1:
        reason = f"{requirements.num_hosts} hosts: one worker on each, placed by Ray"
        yield Setting("TPU_MULTIHOST_BACKEND", "ray", reason)
        yield Setting(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
            "1",
            "message queues between hosts, and the whole environment carried to the workers",
        )
    if requirements.num_slices > 1:
        yield Setting(
            "NUM_SLICES", requirements.num_slices, "the outer axis of the mesh is the slices"
        )
        reason = "one engine over all slices, which spreads requests over them itself"
        yield Setting("TPU_MULTIPROCESS_DP", "0", reason)
    elif requirements.data_parallel > 1:
        reason = "one engine over all copies, which spreads requests over them itself"
        yield Setting("TPU_MULTIPROCESS_DP", "0", reason)
    yield from _model_env(requirements, facts, sharding)
    for name, value, reason in host_cache_env(requirements.args):
        yield Setting(name, value, reason)
    if requirements.compile_cache is not None:
        yield from _cache_env(requirements.compile_cache)


def _model_env(
    requirements: EngineRequirements, facts: ModelFacts | None, sharding: Sharding
) -> Iterator[Setting]:
    if requirements.has_lora:
        yield Setting(MODEL_IMPL, "vllm", "LoRA layers exist in the torch models only")
    elif facts is not None and needs_torch_model(facts, sharding):
        yield Setting(
            MODEL_IMPL,
            "vllm",
            f"the JAX model of {facts.architecture} cannot load {facts.num_kv_heads} KV heads over "
            f"{sharding.attention_shards} shards",
        )
    context = max(
        count(requirements.args, f"{kind}_context_parallel_size") or 1
        for kind in ("decode", "prefill")
    )
    if sharding.attention_data > 1 or (facts is not None and facts.is_mla):
        yield Setting(NEW_DESIGN, "1", "attention data parallelism exists in this design only")
    elif requirements.num_slices > 1:
        yield Setting(NEW_DESIGN, "1", "a mesh over several slices exists in this design only")
    elif requirements.data_parallel > 1:
        yield Setting(NEW_DESIGN, "1", "several copies in one engine exist in this design only")
    elif context > 1:
        yield Setting(NEW_DESIGN, "1", "context parallelism exists in this design only")


def _cache_env(folder: str) -> Iterator[Setting]:
    reason = "compiled programs are read and written here; each host adds a folder for its key"
    yield Setting(PROGRAM_FOLDER, folder, reason)
    # tpu-inference names the folder to JAX when its runner begins, and by then JAX has compiled.
    reason = "the programs that JAX compiles before the runner begins are kept as well"
    yield Setting(JAX_PROGRAM_FOLDER, folder, reason)
    # JAX keeps programs that took a second or longer; most of a warm-up's take less.
    reason = "a restart compiles nothing again, not even what compiles in under a second"
    yield Setting("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0", reason)
    yield Setting("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1", reason)
    # Seen with JAX 0.10.2 on CPU, 2026-11-22: without it the path of the folder is part of each
    # program's key, by way of an option for GPUs, and no program is found from another folder.
    yield Setting(
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES",
        "none",
        "programs are found again whatever folder they lie in; what it switches off is for GPUs",
    )


# -- the rest --


def _by_hand_or(given: Mapping[str, object], chosen: Iterator[Setting]) -> Iterator[Setting]:
    """Yields given settings, then chosen ones beside them; a chosen mapping contains the given."""
    settings = list(chosen)
    merged = {setting.name for setting in settings if isinstance(setting.value, Mapping)}
    for name, value in given.items():
        if name not in merged:
            yield Setting(name, value, BY_HAND)
    for setting in settings:
        if setting.name not in given or setting.name in merged:
            yield setting


def _memory(
    values: Mapping[str, object], facts: ModelFacts | None, staging_tokens: int
) -> MemoryRequirements:
    utilization = values["gpu_memory_utilization"]
    return MemoryRequirements(
        max_model_len=count(values, "max_model_len") or (facts.max_model_len if facts else 0),
        max_num_seqs=count(values, "max_num_seqs") or _DEFAULT_SEQS,
        max_num_batched_tokens=count(values, "max_num_batched_tokens") or _DEFAULT_BATCHED,
        utilization=float(utilization) if isinstance(utilization, (int, float)) else 0.0,
        kv_cache_dtype=str(values.get("kv_cache_dtype", "auto")),
        staging_tokens=staging_tokens,
    )


def _tensor_for(shape: SliceShape, stages: int) -> int:
    for tensor, pipeline in parallelism_choices(shape):
        if pipeline == stages:
            return tensor
    return max(1, shape.num_devices // stages)


def _derived_groups(tensor: int, facts: ModelFacts | None) -> int:
    """Returns the groups tpu-inference makes if no number is given: as many as repeat no KV head.

    It counts keys and values of a head as two rows of 16 bits in a word. Source: its
    `layers/common/sharding.py`, read 2026-11-21.
    """
    if facts is None:
        return 1
    heads = 1 if facts.is_mla else facts.num_kv_heads
    packing = 2 * (2 if facts.head_dim == 64 else 1)
    return max(1, int(tensor // max(1.0, heads * 2 / packing)))


def _notes(
    requirements: EngineRequirements, facts: ModelFacts | None, sharding: Sharding
) -> Iterator[str]:
    if facts is None:
        yield "no config.json at hand: nothing that depends on the model was decided or checked"
    else:
        yield from _model_notes(facts, sharding)
    yield from untried_notes(requirements, facts)
    if requirements.compile_cache is None:
        yield "no compile_cache: compiled programs are lost with the pod, each start compiles anew"
    if is_on(requirements.env, "VLLM_XLA_CHECK_RECOMPILATION"):
        yield "VLLM_XLA_CHECK_RECOMPILATION fails a request whose shape was not warmed up"
    is_eager = requirements.args.get("enforce_eager") is True
    if is_eager or is_on(requirements.env, "SKIP_JAX_PRECOMPILE"):
        yield "no warm-up: the first request of each bucket waits for a compilation"
    if requirements.num_slices > 1:
        yield (
            f"each of the {requirements.num_slices} slices has max_num_seqs and "
            "max_num_batched_tokens of its own; the loss of one ends the engine on all of them"
        )
    if requirements.data_parallel > 1:
        yield (
            f"each of the {requirements.data_parallel} copies has max_num_seqs and "
            "max_num_batched_tokens of its own; they step together"
        )
    if requirements.shape.num_hosts > 1:
        yield _hosts_note(sharding)


def _hosts_note(sharding: Sharding) -> str:
    """Returns what upstream's continuous integration shows of an engine over several hosts.

    Source: tpu-inference `.buildkite/features/multi-host.yml` at 1055bd2c, which runs on a queue of
    16 cores of tpu7x, and `.buildkite/parallelism/PP.yml` at 0763c544, whose steps for several
    hosts are those for one again, test and machine; read 2026-11-29.
    """
    if sharding.pipeline == 1:
        return (
            "upstream tests tensor parallelism over several hosts on tpu7x only, with "
            "tensor_parallel_size 16"
        )
    return (
        "upstream tests pipeline stages on one host only; its table marks them as passing over "
        "several by the same test"
    )


def _model_notes(facts: ModelFacts, sharding: Sharding) -> Iterator[str]:
    if facts.architecture in AUTO_TORCH:
        yield f"{facts.architecture} is loaded as a torch model (MODEL_IMPL_TYPE auto)"
    if not facts.is_mla and shards_more_than_heads(facts, sharding):
        times = sharding.attention_shards // facts.num_kv_heads
        yield (
            f"{facts.num_kv_heads} KV heads over {sharding.attention_shards} shards: each token is "
            f"cached {times} times"
        )
