"""Names the kinds of engines."""

from enum import StrEnum


class EngineKind(StrEnum):
    """The engines that turn token requests into tokens."""

    VLLM = "vllm"  # vLLM on the CPUs of its host, on a laptop or a simulated slice
    VLLM_TPU = "vllm-tpu"  # vLLM with tpu-inference on the chips of a slice
    PACED = "paced"  # a deterministic fake with a fixed pace, for tests and the load test itself
