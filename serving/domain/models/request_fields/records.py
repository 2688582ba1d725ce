"""The rows of vLLM's other records: `PoolingParams`, and `EngineCoreRequest` around both.

Held against vLLM's records by the same test as `sampling`. Values only.
"""

from serving.domain.models.request_fields.rules import FieldRow, FieldOutcome, State
from serving.domain.models.request_fields.sampling import (
    GATEWAY,
    HINT,
    HONOURED,
    INTERNAL,
    MADE_UP,
    STEERING,
    UNREACHABLE,
)

_POOLER = "vllm/model_executor/layers/pooler"
_TPU_POOLER = "tpu_inference/models/common/model_loader.py"
_POOLING_PARAMS = "vllm/pooling_params.py"
_FRONTEND = "vllm/v1/engine/input_processor.py"
_ENTRYPOINTS = "vllm/entrypoints"
_REQUEST = "vllm/v1/engine/__init__.py"


def _internal(name: str, source: str) -> FieldRow:
    return FieldRow(name, INTERNAL, INTERNAL, INTERNAL, source)


def _unreachable(name: str, neutral: tuple[object, ...] = ()) -> FieldRow:
    return FieldRow(name, UNREACHABLE, UNREACHABLE, UNREACHABLE, _ENTRYPOINTS, neutral)


POOLING: tuple[FieldRow, ...] = (
    # tpu-inference computes these by vLLM's own pooler.
    FieldRow("use_activation", HONOURED, HONOURED, MADE_UP, f"{_POOLER}; {_TPU_POOLER}"),
    FieldRow("dimensions", HONOURED, HONOURED, MADE_UP, f"{_POOLER}; {_TPU_POOLER}"),
    _unreachable("step_tag_id"),
    _unreachable("returned_token_ids"),
    FieldRow("task", HONOURED, HONOURED, MADE_UP, f"{_FRONTEND}; tpu_inference/core/core_tpu.py"),
    _internal("requires_token_ids", _POOLING_PARAMS),
    _internal("skip_reading_prefix_cache", _POOLING_PARAMS),
    # The frontend sets it to score with models of late interaction. vLLM's worker keeps the
    # queries; tpu-inference's knows nothing of them.
    FieldRow(
        "late_interaction_params",
        HONOURED,
        FieldOutcome(State.IGNORED, "engines on TPU do not score by late interaction"),
        MADE_UP,
        "vllm/v1/pool/late_interaction_runner.py; tpu_inference/runner",
        instead="/pooling gives the vectors to score with",
    ),
    # Of an operator's plugin for /pooling.
    _internal("extra_kwargs", _POOLING_PARAMS),
    _internal("output_kind", _POOLING_PARAMS),
)

REQUEST: tuple[FieldRow, ...] = (
    _internal("request_id", _REQUEST),
    FieldRow("prompt_token_ids", HONOURED, HONOURED, HONOURED, _REQUEST),
    FieldRow("mm_features", HONOURED, HONOURED, MADE_UP, _REQUEST),
    _internal("sampling_params", "judged field by field"),
    _internal("pooling_params", "judged field by field"),
    _internal("arrival_time", _REQUEST),
    FieldRow("lora_request", HONOURED, HONOURED, MADE_UP, _REQUEST),
    FieldRow("cache_salt", HONOURED, HONOURED, HONOURED, "vllm/v1/core/kv_cache_utils.py"),
    FieldRow("data_parallel_rank", STEERING, STEERING, STEERING, _REQUEST),
    # Nothing of tpu-inference reads it.
    FieldRow(
        "prompt_embeds",
        HONOURED,
        FieldOutcome(State.LACKING, "engines on TPU take no embeddings for a prompt"),
        MADE_UP,
        "vllm/v1/worker/gpu_model_runner.py; tpu_inference/runner",
        neutral=([],),
        instead="prompt takes text and tokens",
    ),
    _internal("prompt_is_token_ids", _FRONTEND),
    _internal("client_index", _REQUEST),
    _internal("current_wave", _REQUEST),
    FieldRow("priority", STEERING, STEERING, STEERING, "vllm/v1/core/sched/request_queue.py"),
    FieldRow("trace_headers", HINT, HINT, HINT, "vllm/v1/engine/output_processor.py"),
    _unreachable("resumable", (False,)),
    _internal("external_req_id", _FRONTEND),
    FieldRow("reasoning_ended", GATEWAY, GATEWAY, GATEWAY, "vllm/v1/engine/async_llm.py"),
    FieldRow("reasoning_parser_kwargs", GATEWAY, GATEWAY, GATEWAY, "vllm/v1/engine/async_llm.py"),
    _unreachable("abort_immediately", (False,)),
    # vLLM 0.32.0 copies it into its own request and reads it nowhere.
    FieldRow("session_id", HINT, HINT, HINT, "vllm/v1/request.py"),
    _unreachable("kv_hints"),
)
