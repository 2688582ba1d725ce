"""Reads a model's size from its `config.json`: layers, heads, experts, parameters, precision.

Owns the reading of that file and the parameter count per part. Does not own the sharding of the
parts (`hbm`), nor where the file is. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Architectures whose parameters are counted here: decoders of one kind of layer, with GQA.
_DENSE = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_MOE = frozenset({"Qwen3MoeForCausalLM", "MixtralForCausalLM"})
_QK_NORM = frozenset({"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})
_QKV_BIAS = frozenset({"Qwen2ForCausalLM"})

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_FP8_BLOCK = 128 * 128
# Of a weight that qwix quantises with one scale for each of its channels, which is next to nothing.
_QWIX_BYTES = {"float8_e4m3fn": 1.0, "float8_e5m2": 1.0, "int8": 1.0, "int4": 0.5}


class ModelFactsError(ValueError):
    """Reports that the file lacks facts, or the architecture is not known here. No budget then."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The storage of weights: bytes of a parameter in linear layers, and in all others.

    `method` is the quantisation by vLLM's name, `None` if there is none. Embeddings, output head,
    norms and routers stay in the model's dtype.
    """

    method: str | None
    linear_bytes: float
    other_bytes: float


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The shape of a decoder, in counts of the whole model.

    `num_experts` of 0 means a dense one, which has an `experts_per_token` of 1. `intermediate_size`
    is that of a dense MLP, or of one expert. `is_mla` and `is_multimodal` are known for any
    architecture. `is_countable` means that the parameters can be counted from the rest.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    num_experts: int
    experts_per_token: int
    is_tied: bool
    weights: WeightFormat
    is_mla: bool = False
    is_multimodal: bool = False

    @property
    def is_countable(self) -> bool:
        """True if `num_parameters` is known for this architecture."""
        return self.architecture in _DENSE | _MOE and not self.is_mla

    @property
    def q_parameters(self) -> int:
        """The parameters of a layer's query and output projections, with norms and biases."""
        width = self.num_heads * self.head_dim
        bias = width if self.architecture in _QKV_BIAS else 0
        norm = 2 * self.head_dim if self.architecture in _QK_NORM else 0
        return 2 * self.hidden_size * width + bias + norm

    @property
    def kv_parameters_per_head(self) -> int:
        """The parameters of one layer's key and value projections, for one KV head."""
        rows = self.hidden_size + (1 if self.architecture in _QKV_BIAS else 0)
        return 2 * rows * self.head_dim

    @property
    def mlp_parameters(self) -> int:
        """The parameters of one layer's MLP, or of all its experts."""
        return max(1, self.num_experts) * 3 * self.hidden_size * self.intermediate_size

    @property
    def other_parameters(self) -> int:
        """The parameters of one layer's norms and router, which are on every device."""
        return 2 * self.hidden_size + self.num_experts * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """The parameters of the token embedding; an output head that is not tied has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """The number of all parameters, tied ones once."""
        layer = (
            self.q_parameters
            + self.num_kv_heads * self.kv_parameters_per_head
            + self.mlp_parameters
            + self.other_parameters
        )
        ends = self.embedding_parameters * (1 if self.is_tied else 2) + self.hidden_size
        return self.num_layers * layer + ends


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Returns the facts in a parsed `config.json`, as transformers writes it.

    Raises:
        ModelFactsError: a field is missing or of the wrong kind.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelFactsError("config.json names no architecture in `architectures`")
    # A multimodal model keeps its decoder's fields in a section of their own.
    text = config.get("text_config", config)
    num_experts = _count(text, "num_experts", "num_local_experts", default=0)
    heads = _count(text, "num_attention_heads")
    hidden = _count(text, "hidden_size")
    narrow = ("moe_intermediate_size",) if num_experts else ()
    return ModelFacts(
        architecture=str(architectures[0]),
        num_layers=_count(text, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_count(text, *narrow, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_count(text, "num_key_value_heads", default=heads),
        head_dim=_count(text, "head_dim", default=hidden // heads),
        vocab_size=_count(text, "vocab_size"),
        max_model_len=_count(text, "max_position_embeddings"),
        num_experts=num_experts,
        experts_per_token=_count(text, "num_experts_per_tok", default=1),
        is_tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        weights=_stored_format(config, text),
        is_mla=text.get("kv_lora_rank") is not None,
        is_multimodal="vision_config" in config or "audio_config" in config,
    )


def with_quantization(facts: WeightFormat, method: str) -> WeightFormat:
    """Returns the format once vLLM has quantised weights that are stored as `facts` describe.

    Raises:
        ModelFactsError: the size of that method's weights is not known here.
    """
    if facts.method == method:
        return facts
    if method != "fp8":
        raise ModelFactsError(
            f"the size of weights quantised with {method} is read from the model's config.json, "
            "which has no quantization_config"
        )
    return WeightFormat("fp8", 1.0, facts.other_bytes)


def with_qwix(facts: WeightFormat, rules: Sequence[Mapping[str, Any]]) -> WeightFormat:
    """Returns the format once qwix has quantised linear layers as they are loaded.

    Raises:
        ModelFactsError: the rules are of some modules only, or of a type that is not known here.
    """
    first = rules[0]
    if len(rules) > 1 or first.get("module_path", ".*") != ".*":
        raise ModelFactsError("rules of qwix for some of the modules are not counted here")
    dtype = str(first.get("weight_qtype"))
    if dtype not in _QWIX_BYTES:
        raise ModelFactsError(
            f"a rule of qwix has weight_qtype {dtype}; known: {', '.join(_QWIX_BYTES)}"
        )
    return WeightFormat("qwix", _QWIX_BYTES[dtype], facts.other_bytes)


def _stored_format(config: Mapping[str, Any], text: Mapping[str, Any]) -> WeightFormat:
    dtype = str(
        config.get("dtype")
        or config.get("torch_dtype")
        or text.get("dtype")
        or text.get("torch_dtype")
        or "bfloat16"
    )
    if dtype not in _BYTES:
        raise ModelFactsError(f"config.json has dtype {dtype}; known: {', '.join(_BYTES)}")
    plain = _BYTES[dtype]
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return WeightFormat(None, plain, plain)
    method = str(quantization.get("quant_method"))
    bits, scale_bytes = _quantized_bits(method, quantization)
    return WeightFormat(method, bits / 8 + scale_bytes, plain)


def _quantized_bits(method: str, quantization: Mapping[str, Any]) -> tuple[int, float]:
    """Returns the bits of a weight, and the bytes of scales that go with each."""
    if method == "fp8":
        # One float32 scale a block; without blocks one a tensor.
        return 8, 4 / _FP8_BLOCK if quantization.get("weight_block_size") else 0.0
    if method in ("awq", "auto_awq"):
        # A 16-bit scale and a zero point of the weight's bits, per group.
        bits = int(quantization.get("bits", 4))
        return bits, (2 + bits / 8) / int(quantization.get("group_size", 128))
    if method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        widest = max((int(group["weights"]["num_bits"]) for group in groups.values()), default=0)
        if widest:
            return widest, 2 / 128 if widest < 8 else 0.0
    raise ModelFactsError(
        f"quantization_config has quant_method {method}, whose sizes are not known here; known: "
        "fp8, auto_awq, compressed-tensors with config_groups"
    )


def _count(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if value is not None:
            raise ModelFactsError(f"config.json: {name} is {value!r}, not a count")
    if default is None:
        raise ModelFactsError(f"config.json has no {names[-1]}")
    return default
