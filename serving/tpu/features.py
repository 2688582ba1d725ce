"""Knows for each feature of tpu-inference 0.32.0 whether we have run it, and says so where we not.

Owns the three states: run (by us, on JAX CPU, with requests resumed); untried
(allowed; upstream has a test of its own, which is named); refused (with the reason, by `rules`).
Pure.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from serving.tpu.model_facts import ModelFacts
from serving.tpu.offload import has_host_cache
from serving.tpu.requirements import EngineRequirements, count, section


class FeatureState(StrEnum):
    """What is known of a feature."""

    RUN = "run"
    UNTRIED = "untried"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature; `shown_by` is our test, upstream's own test, or why it is refused.

    Tests are files below `tests/`: of ours, or of tpu-inference's wheel, where an empty one means
    that it has none.
    """

    name: str
    state: FeatureState
    shown_by: str
    is_used: Callable[[EngineRequirements, ModelFacts | None], bool]

    @property
    def words(self) -> str:
        """The state for a reader."""
        if self.state is not FeatureState.UNTRIED:
            return self.shown_by
        return f"upstream's own test is {self.shown_by}" if self.shown_by else "nor by upstream"


def features_used(
    requirements: EngineRequirements, facts: ModelFacts | None
) -> tuple[Feature, ...]:
    """Returns what an engine uses of the table; what depends on the model only with its facts."""
    return tuple(each for each in FEATURES if each.is_used(requirements, facts))


def untried_notes(requirements: EngineRequirements, facts: ModelFacts | None) -> Iterator[str]:
    """Yields a warning for each feature in use that we have not run."""
    for feature in features_used(requirements, facts):
        if feature.state is FeatureState.UNTRIED:
            yield f"{feature.name}: never run by Slicewise, not even on CPU; {feature.words}"


def features_markdown(features: Iterable[Feature] | None = None) -> str:
    """Returns the table as the documentation shows it."""
    head = ["| feature | state | shown by, or why |", "|---|---|---|"]
    told = FEATURES if features is None else features
    return "\n".join([*head, *(f"| {each.name} | {each.state} | {each.words} |" for each in told)])


def _always(_requirements: EngineRequirements, _facts: ModelFacts | None) -> bool:
    return True


def _quantized(*methods: str) -> Callable[[EngineRequirements, ModelFacts | None], bool]:
    def is_used(requirements: EngineRequirements, facts: ModelFacts | None) -> bool:
        stored = None if facts is None else facts.weights.method
        return (requirements.args.get("quantization") or stored) in methods

    return is_used


def _guesses(*methods: str) -> Callable[[EngineRequirements, ModelFacts | None], bool]:
    def is_used(requirements: EngineRequirements, _: ModelFacts | None) -> bool:
        method = section(requirements.args, "speculative_config").get("method")
        return method in methods or ("mtp" in methods and str(method).endswith("_mtp"))

    return is_used


def _connects(*connectors: str) -> Callable[[EngineRequirements, ModelFacts | None], bool]:
    def is_used(requirements: EngineRequirements, _: ModelFacts | None) -> bool:
        connector = section(requirements.args, "kv_transfer_config").get("kv_connector")
        return connector in connectors

    return is_used


def _has_experts(_: EngineRequirements, facts: ModelFacts | None) -> bool:
    return facts is not None and facts.num_experts > 0


def _pipelined(requirements: EngineRequirements, _: ModelFacts | None) -> bool:
    return (count(requirements.args, "pipeline_parallel_size") or 1) > 1


def _context_parallel(requirements: EngineRequirements, _: ModelFacts | None) -> bool:
    kinds = ("decode", "prefill")
    sizes = (count(requirements.args, f"{kind}_context_parallel_size") for kind in kinds)
    return any((size or 1) > 1 for size in sizes)


def _continues_decode(requirements: EngineRequirements, _: ModelFacts | None) -> bool:
    additional = section(requirements.args, "additional_config")
    return additional.get("enable_continue_decode") is True


def _has_fp8_cache(requirements: EngineRequirements, _: ModelFacts | None) -> bool:
    return str(requirements.args.get("kv_cache_dtype", "")).startswith("fp8")


def _is_mla(_: EngineRequirements, facts: ModelFacts | None) -> bool:
    return facts is not None and facts.is_mla


_PARITY, _FEATURES = "tests/tpu_sim/test_parity.py", "tests/tpu_sim/test_features.py"
_SERVED, _USUAL = "tests/tpu_sim/test_served.py", "tests/tpu_sim/test_usual_fields.py"
_RUN, _UNTRIED, _REFUSED = FeatureState.RUN, FeatureState.UNTRIED, FeatureState.REFUSED

FEATURES: tuple[Feature, ...] = (
    Feature("chunked prefill, prefix cache, asynchronous scheduling", _RUN, _PARITY, _always),
    Feature("tensor parallelism, also over hosts", _RUN, _SERVED, _always),
    Feature("pipeline stages, also over hosts", _RUN, _SERVED, _pipelined),
    Feature(
        "data parallelism over joined slices",
        _RUN,
        _SERVED,
        lambda requirements, _: requirements.num_slices > 1,
    ),
    Feature(
        "data parallelism on one slice",
        _RUN,
        _PARITY,
        lambda requirements, _: requirements.data_parallel > 1,
    ),
    Feature(
        "attention data parallelism",
        _RUN,
        _PARITY,
        lambda requirements, _: requirements.strategy.get("enable_dp_attention") is True,
    ),
    Feature("adapters (LoRA)", _RUN, _PARITY, lambda requirements, _: requirements.has_lora),
    Feature("grammars, log-probabilities", _RUN, _USUAL, _always),
    Feature("experts, also spread by expert parallelism", _RUN, _FEATURES, _has_experts),
    Feature("weights stored in fp8", _RUN, _FEATURES, _quantized("fp8")),
    Feature("KV cache in fp8", _RUN, _FEATURES, _has_fp8_cache),
    Feature(
        "KV cache in the host's memory, on one host",
        _RUN,
        _FEATURES,
        lambda requirements, _: has_host_cache(requirements.args),
    ),
    Feature("speculation by n-grams", _RUN, _FEATURES, _guesses("ngram")),
    Feature("speculation by an EAGLE-3 draft", _RUN, _FEATURES, _guesses("eagle3")),
    Feature(
        "speculation by EAGLE",
        _UNTRIED,
        "tests/spec_decode/test_eagle3.py (EAGLE-3)",
        _guesses("eagle"),
    ),
    Feature(
        "speculation by DFlash", _UNTRIED, "tests/spec_decode/test_dflash.py", _guesses("dflash")
    ),
    Feature("speculation by DSpark", _UNTRIED, "", _guesses("dspark")),
    Feature(
        "speculation by further heads (MTP)",
        _UNTRIED,
        "tests/e2e/test_speculative_decoding.py",
        _guesses("mtp"),
    ),
    Feature("latent attention (MLA)", _UNTRIED, "tests/layers/vllm/test_mla_attention.py", _is_mla),
    Feature(
        "images, sound and video in prompts",
        _UNTRIED,
        "tests/e2e/test_multi_modal_inference.py",
        lambda _, facts: facts is not None and facts.is_multimodal,
    ),
    Feature(
        "weights quantised by AWQ",
        _UNTRIED,
        "tests/layers/vllm/test_awq.py",
        _quantized("awq", "auto_awq"),
    ),
    Feature(
        "weights quantised by compressed-tensors",
        _UNTRIED,
        "tests/layers/vllm/test_compressed_tensors_w8a8_fp8.py",
        _quantized("compressed-tensors"),
    ),
    Feature(
        "weights in MXFP4",
        _UNTRIED,
        "tests/layers/vllm/test_mxfp4.py",
        _quantized("mxfp4", "gpt_oss_mxfp4"),
    ),
    Feature(
        "weights in NVFP4",
        _UNTRIED,
        "tests/layers/vllm/test_nvfp4.py",
        _quantized("modelopt", "modelopt_fp4"),
    ),
    Feature("weights in DeepSeek V4's fp8", _UNTRIED, "", _quantized("deepseek_v4_fp8")),
    Feature(
        "weights quantised by qwix while they load",
        _UNTRIED,
        "tests/layers/jax/test_qwix.py",
        lambda requirements, _: bool(requirements.qwix_rules),
    ),
    Feature(
        "embeddings and other pooling",
        _UNTRIED,
        "tests/e2e/test_step_pooling.py",
        lambda requirements, _: requirements.args.get("runner") == "pooling",
    ),
    Feature(
        "context parallelism",
        _UNTRIED,
        "tests/layers/common/test_pcp_attention_interface.py",
        _context_parallel,
    ),
    Feature("continued decoding", _UNTRIED, "tests/e2e/test_continue_decode.py", _continues_decode),
    Feature(
        "KV cache handed to another engine (TPUConnector)",
        _REFUSED,
        "no gateway sends one request to two engines, one for its prompt and one for its answer",
        _connects("TPUConnector", "TPUConnectorHMA"),
    ),
    Feature(
        "KV cache in a store outside (RaidenOffloadConnector)",
        _REFUSED,
        "the package tpu-raiden that it needs is in no list of upstream's, nor in our image",
        _connects("RaidenOffloadConnector"),
    ),
)
