"""Refuses what tpu-inference 0.32.0 rejects or loads wrongly, before anything starts.

Owns these rules as far as they follow from the configuration alone; those that need the model's
`config.json` are in `model_rules`. Does not own the effects of a configuration that is allowed
(`settings`). Pure.

Source of every rule, unless it names another: the wheels of tpu-inference and vllm-tpu 0.32.0
(`platforms/tpu_platform.py`, `layers/common/sharding.py`, `envs.py`), read 2026-11-21.
"""

import math
from collections.abc import Iterator

from serving.domain.errors import Problem
from serving.domain.topology import parallelism_choices, sees_whole_stages
from serving.tpu.chips import VISIBLE_CHIPS
from serving.tpu.offload import CONNECTOR, has_host_cache, host_cache_problems
from serving.tpu.requirements import Args, EngineRequirements, count, is_on, section

MODEL_IMPL = "MODEL_IMPL_TYPE"
NEW_DESIGN = "NEW_MODEL_DESIGN"
# Ours: each host's slice in a multislice, by Ray's node id, as JSON (`serving.tpu.multislice`).
SLICE_IDS_VARIABLE = "SLICEWISE_SLICE_IDS"

# Where compiled programs are kept: as vLLM and tpu-inference name it, and as JAX does.
PROGRAM_FOLDER = "VLLM_XLA_CACHE_PATH"
JAX_PROGRAM_FOLDER = "JAX_COMPILATION_CACHE_DIR"

_SHARED = "for engines that share a slice use num_engines of the deployment's slice"
# Variables that follow from the slice, with the reason why nobody else sets them.
_OWNED_ENV = {
    "TPU_MULTIHOST_BACKEND": "it follows from the hosts of the slice",
    "TPU_MULTIPROCESS_DP": _SHARED,
    VISIBLE_CHIPS: _SHARED,
    "NUM_SLICES": "use num_slices of the deployment's slice",
    SLICE_IDS_VARIABLE: "it follows from the slices that are reserved",
    PROGRAM_FOLDER: "use compile_cache, which keeps shapes and versions apart",
    JAX_PROGRAM_FOLDER: "use compile_cache, which keeps shapes and versions apart",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "Slicewise places workers through the second executor",
    "VLLM_RAY_BUNDLE_INDICES": "workers run in the placement group of their slice",
}
_OWNED_PREFIX = "MEGASCALE_"
_QUANTIZATIONS = (
    "compressed-tensors",
    "auto_awq",
    "fp8",
    "gpt_oss_mxfp4",
    "modelopt_fp4",
    "deepseek_v4_fp8",
)
# Connectors that tpu-inference takes and we refuse, with the reason.
_REFUSED_CONNECTORS = {
    "TPUConnector": "no gateway sends one request to two engines",
    "TPUConnectorHMA": "no gateway sends one request to two engines",
    "RaidenOffloadConnector": "the package tpu-raiden that it needs is not in the image",
}
_SPECULATIVE = ("ngram", "dflash", "dspark", "eagle", "eagle3", "mtp")


def argument_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    """Yields problems with any model. `path` is the model's place in the configuration."""
    yield from _owned_env_problems(f"{path}.engine_env", requirements)
    yield from _data_parallel_problems(path, requirements)
    yield from _stage_problems(path, requirements)
    yield from _joined_problems(path, requirements)
    yield from _copies_problems(path, requirements)
    yield from _context_parallel_problems(f"{path}.engine_args", requirements)
    yield from _feature_problems(f"{path}.engine_args", requirements.args)
    yield from host_cache_problems(f"{path}.engine_args", requirements)
    yield from _decode_problems(f"{path}.engine_args", requirements)
    if requirements.has_lora and requirements.env.get(MODEL_IMPL, "vllm") not in ("vllm", "auto"):
        yield Problem(
            f"{path}.engine_env.{MODEL_IMPL}",
            "LoRA layers exist in the torch models only",
            "allowed with enable_lora: vllm, or leave it out",
            requirements.env[MODEL_IMPL],
        )


def _owned_env_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    for name, value in requirements.env.items():
        if name in _OWNED_ENV:
            yield Problem(f"{path}.{name}", "set by Slicewise", _OWNED_ENV[name], value)
        elif name.startswith(_OWNED_PREFIX):
            yield Problem(f"{path}.{name}", "refused", _OWNED_ENV["NUM_SLICES"], value)


def _data_parallel_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    strategy = requirements.strategy
    groups = count(strategy, "attn_dp_size")
    is_attention_data = strategy.get("enable_dp_attention") is True
    if requirements.has_lora and is_attention_data and groups != 1:
        yield Problem(
            f"{path}.engine_args.additional_config",
            "tpu-inference has no LoRA with attention data parallelism",
            "allowed: enable_dp_attention: false, or no enable_lora",
            "enable_dp_attention: true",
        )
    tensor = count(requirements.args, "tensor_parallel_size")
    if groups is not None and tensor is not None and (groups < 1 or tensor % groups):
        yield Problem(
            f"{path}.engine_args.additional_config",
            f"attn_dp_size does not divide tensor_parallel_size {tensor}",
            f"allowed: a divisor of {tensor}",
            f"{groups}",
        )
    if (
        is_attention_data
        and NEW_DESIGN in requirements.env
        and not is_on(requirements.env, NEW_DESIGN)
    ):
        yield Problem(
            f"{path}.engine_env.{NEW_DESIGN}",
            "attention data parallelism exists in the new model design only",
            "allowed: 1, or leave it out",
            requirements.env[NEW_DESIGN],
        )


def _stage_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    """Yields pipeline stages that would see fewer devices than they need.

    Source: `tpu_info.get_num_cores_per_chip` and `worker/tpu_worker.py`, whose `init_device`
    asserts that there are as many, read 2026-11-29.
    """
    shape, stages = requirements.shape, count(requirements.args, "pipeline_parallel_size") or 1
    if sees_whole_stages(shape, stages):
        return
    allowed = ["1", *(f"{each}" for _, each in parallelism_choices(shape) if each > 1)]
    devices = shape.num_devices // stages
    yield Problem(
        f"{path}.engine_args.pipeline_parallel_size",
        f"tpu-inference counts {shape.cores_per_chip} devices for a chip of {shape.generation}, "
        f"where JAX has {shape.devices_per_chip}: a stage of {devices} devices would see "
        f"{math.ceil(devices / shape.cores_per_chip)}, and its worker ends at start",
        f"allowed: {' or '.join(allowed)}",
        f"{stages}",
    )


def _joined_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    """Yields what cannot be spread over slices that each hold the model and their own requests."""
    if requirements.num_slices == 1:
        return
    joined = f"{requirements.num_slices} joined slices"
    if requirements.has_lora:
        yield Problem(
            f"{path}.engine_args.enable_lora",
            f"tpu-inference has no LoRA with data parallelism, which {joined} need",
            "allowed: false, or num_slices: 1 and more replicas",
            "true",
        )
    stages = count(requirements.args, "pipeline_parallel_size") or 1
    if stages > 1:
        yield Problem(
            f"{path}.engine_args.pipeline_parallel_size",
            f"a pipeline's stages are JAX clusters of one host each, which do not span {joined}",
            "allowed: 1, or num_slices: 1",
            f"{stages}",
        )
    if NEW_DESIGN in requirements.env and not is_on(requirements.env, NEW_DESIGN):
        yield Problem(
            f"{path}.engine_env.{NEW_DESIGN}",
            f"{joined} have a mesh in the new model design only",
            "allowed: 1, or leave it out",
            requirements.env[NEW_DESIGN],
        )
    for kind in ("decode", "prefill"):
        size = count(requirements.args, f"{kind}_context_parallel_size") or 1
        if size > 1:
            yield Problem(
                f"{path}.engine_args.{kind}_context_parallel_size",
                f"context parallelism was never seen together with {joined}",
                "allowed: 1, or num_slices: 1",
                f"{size}",
            )
    if requirements.strategy.get("device_indexes") is not None:
        yield Problem(
            f"{path}.engine_args.additional_config",
            f"the order of devices follows from the {joined}",
            "allowed: no device_indexes",
            "device_indexes",
        )


def _copies_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    """Yields what cannot be where several copies of a model share one slice."""
    copies = requirements.data_parallel
    if copies == 1:
        return
    field = f"{path}.engine_args.data_parallel_size"
    reasons = {
        "joined slices hold a copy each already": requirements.num_slices > 1,
        "copies of a model over several hosts were never run": requirements.shape.num_hosts > 1,
        "its copies have no pipeline stages": (
            (count(requirements.args, "pipeline_parallel_size") or 1) > 1
        ),
        "tpu-inference has no LoRA with data parallelism": requirements.has_lora,
        "it was never seen together with a sharding_strategy": bool(requirements.strategy),
        "a KV cache in the host's memory does not know of copies": has_host_cache(
            requirements.args
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            yield Problem(field, reason, "allowed: 1, or num_engines of the slice", f"{copies}")
    tensor = count(requirements.args, "tensor_parallel_size")
    devices = requirements.shape.num_devices
    if devices % copies or requirements.shape.num_chips % copies:
        chips = requirements.shape.num_chips
        allowed = f"allowed: a divisor of {chips}, so that each copy has whole chips"
        yield Problem(field, f"does not divide {chips} chips", allowed, f"{copies}")
    elif tensor is not None and tensor * copies != devices:
        yield Problem(
            f"{path}.engine_args.tensor_parallel_size",
            f"{copies} copies of it are not the {devices} devices of the slice",
            f"allowed: {devices // copies}, or leave it out",
            f"{tensor}",
        )
    if NEW_DESIGN in requirements.env and not is_on(requirements.env, NEW_DESIGN):
        yield Problem(
            f"{path}.engine_env.{NEW_DESIGN}",
            "several copies in one engine exist in the new model design only",
            "allowed: 1, or leave it out",
            requirements.env[NEW_DESIGN],
        )


def _context_parallel_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    decode = count(requirements.args, "decode_context_parallel_size") or 1
    prefill = count(requirements.args, "prefill_context_parallel_size") or 1
    if decode > 1 and prefill > 1:
        yield Problem(
            f"{path}.prefill_context_parallel_size",
            "decode_context_parallel_size is given as well",
            "allowed: one of the two",
            f"{prefill}",
        )
    if prefill > 1 and prefill % 2:
        allowed = "allowed: 1, or an even number"
        yield Problem(f"{path}.prefill_context_parallel_size", "odd", allowed, f"{prefill}")
    tensor = count(requirements.args, "tensor_parallel_size")
    if decode > 1 and tensor is not None and tensor % decode:
        yield Problem(
            f"{path}.decode_context_parallel_size",
            f"does not divide tensor_parallel_size {tensor}",
            f"allowed: a divisor of {tensor}",
            f"{decode}",
        )


def _feature_problems(path: str, args: Args) -> Iterator[Problem]:
    if args.get("enable_sleep_mode") is True:
        allowed = "allowed: false; an engine that is not needed is scaled away"
        yield Problem(f"{path}.enable_sleep_mode", "a TPU engine cannot sleep", allowed, "true")
    yield from _one_of(path, "quantization", args.get("quantization"), _QUANTIZATIONS)
    connector = section(args, "kv_transfer_config").get("kv_connector")
    if isinstance(connector, str) and connector in _REFUSED_CONNECTORS:
        yield Problem(
            f"{path}.kv_transfer_config.kv_connector",
            _REFUSED_CONNECTORS[connector],
            f"allowed: {CONNECTOR}, or no kv_transfer_config",
            connector,
        )
    else:
        yield from _one_of(f"{path}.kv_transfer_config", "kv_connector", connector, (CONNECTOR,))
    method = section(args, "speculative_config").get("method")
    if not (isinstance(method, str) and method.endswith("_mtp")):
        yield from _one_of(f"{path}.speculative_config", "method", method, _SPECULATIVE)
    if args.get("mamba_cache_mode") == "all":
        allowed = "allowed: align or none"
        yield Problem(f"{path}.mamba_cache_mode", "not on TPU", allowed, "all")
    if args.get("attention_backend") is not None:
        yield Problem(
            f"{path}.attention_backend",
            "tpu-inference takes none in a Ray actor",
            "allowed: leave it out",
            f"{args['attention_backend']}",
        )


def _decode_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    is_continued = (
        section(requirements.args, "additional_config").get("enable_continue_decode") is True
    )
    stages = count(requirements.args, "pipeline_parallel_size") or 1
    if is_continued and (stages > 1 or requirements.args.get("runner") == "pooling"):
        what = "a pipeline" if stages > 1 else "a pooling model"
        yield Problem(
            f"{path}.additional_config",
            f"continued decoding does not exist for {what}",
            "allowed: enable_continue_decode: false",
            "enable_continue_decode: true",
        )


def _one_of(path: str, name: str, value: object, known: tuple[str, ...]) -> Iterator[Problem]:
    if isinstance(value, str) and value not in known:
        allowed = f"allowed: {', '.join(known)}"
        yield Problem(f"{path}.{name}", "not on TPU", allowed, value)
