"""The rows of vLLM's `SamplingParams`: every field, at every kind of engine. Values only.

A test holds the names and the neutral values against vLLM's record, so that an upgrade brings up
what is new. tpu-inference copies `logit_bias`, `min_tokens` and bad words into its batch
(`runner/input_batch.py`), from where nothing reads them: its sampler knows temperature, top-k and
top-p alone (`layers/jax/sample/sampling_metadata.py`).
"""

from serving.domain.models.request_fields.rules import Alias, FieldRow, FieldOutcome, State, Trait

HONOURED = FieldOutcome(State.HONOURED)
MADE_UP = FieldOutcome(State.MADE_UP)
GATEWAY = FieldOutcome(State.GATEWAY)
STEERING = FieldOutcome(State.STEERING)
HINT = FieldOutcome(State.HINT)
INTERNAL = FieldOutcome(State.INTERNAL)
UNREACHABLE = FieldOutcome(State.UNREACHABLE, "no route takes it")

_BATCH = "vllm/v1/worker/gpu_input_batch.py"
_PENALTIES = "vllm/v1/sample/ops/penalties.py"
_PROCESSORS = "vllm/v1/sample/logits_processor/builtin.py"
_SAMPLER = "vllm/v1/sample/sampler.py"
_STOP = "vllm/v1/core/sched/utils.py"
_DETOKENIZER = "vllm/v1/engine/detokenizer.py"
_OUTPUT = "vllm/v1/engine/output_processor.py"
_PARAMS = "vllm/sampling_params.py"
_TPU_SAMPLER = "tpu_inference/layers/jax/sample/sampling_metadata.py"
_TPU_BATCH = "tpu_inference/runner/input_batch.py"
_TPU_RUNNER = "tpu_inference/runner/tpu_runner.py"

_IGNORED_ON_TPU = FieldOutcome(State.IGNORED, "engines on TPU ignore it")
_NO_LOGPROBS = FieldOutcome(State.LACKING, "the engines of this model have no log-probabilities")
_SPECULATING = FieldOutcome(
    State.LACKING, "the engines of this model speculate, and cannot do it", (Trait.SPECULATES,)
)


def _internal(name: str, source: str = _PARAMS) -> FieldRow:
    return FieldRow(name, INTERNAL, INTERNAL, INTERNAL, source)


def _by_gateway(name: str, source: str) -> FieldRow:
    return FieldRow(name, GATEWAY, GATEWAY, GATEWAY, source)


def _unreachable(name: str, neutral: tuple[object, ...] = ()) -> FieldRow:
    return FieldRow(name, UNREACHABLE, UNREACHABLE, UNREACHABLE, "vllm/entrypoints", neutral)


def _honoured(
    name: str, source: str, paced: FieldOutcome = MADE_UP, neutral: tuple[object, ...] = ()
) -> FieldRow:
    return FieldRow(name, HONOURED, HONOURED, paced, source, neutral)


SAMPLING: tuple[FieldRow, ...] = (
    _by_gateway("n", "vllm/v1/engine/async_llm.py"),
    FieldRow(
        "presence_penalty",
        HONOURED,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"{_PENALTIES}; {_TPU_SAMPLER}",
        neutral=(0,),
    ),
    FieldRow(
        "frequency_penalty",
        HONOURED,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"{_PENALTIES}; {_TPU_SAMPLER}",
        neutral=(0,),
    ),
    FieldRow(
        "repetition_penalty",
        HONOURED,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"{_PENALTIES}; {_TPU_SAMPLER}",
        neutral=(1,),
    ),
    _honoured("temperature", f"{_SAMPLER}; {_TPU_SAMPLER}"),
    # A watermark needs vLLM's second model runner, which CPUs have not; without one vLLM warns
    # once and goes on.
    FieldRow(
        "watermarking",
        FieldOutcome(State.IGNORED, "no engine of this model has a watermark"),
        FieldOutcome(State.IGNORED, "no engine of this model has a watermark"),
        MADE_UP,
        "vllm/config/vllm.py",
        neutral=(False,),
    ),
    _honoured("top_p", f"{_SAMPLER}; {_TPU_SAMPLER}"),
    _honoured("top_k", f"{_SAMPLER}; {_TPU_SAMPLER}"),
    FieldRow(
        "min_p",
        _SPECULATING,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"{_PROCESSORS}; {_PARAMS}; {_TPU_SAMPLER}",
        neutral=(0,),
        instead="top_p is honoured",
    ),
    # `validate_request` of tpu-inference raises, which came back as a 500 with an empty message
    # (run 2026-11-21). vLLM takes -1 for none.
    FieldRow(
        "seed",
        HONOURED,
        FieldOutcome(State.LACKING, "engines on TPU have no seed per request"),
        MADE_UP,
        f"{_BATCH}; tpu_inference/platforms/tpu_platform.py",
        neutral=(-1,),
        instead="temperature 0 gives output that repeats",
    ),
    _by_gateway("stop", _DETOKENIZER),
    _honoured("stop_token_ids", _STOP, neutral=([],)),
    _honoured("ignore_eos", _STOP, neutral=(False,)),
    _honoured("max_tokens", _STOP, paced=HONOURED),
    # Its sampler does not keep the end from being chosen, and the scheduler stops at an end before
    # it looks at the least number.
    FieldRow(
        "min_tokens",
        HONOURED,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"{_PROCESSORS}; {_STOP}; {_TPU_BATCH}",
        neutral=(0,),
        instead="ignore_eos with max_tokens gives a length",
    ),
    FieldRow(
        "logprobs",
        HONOURED,
        HONOURED,
        _NO_LOGPROBS,
        f"{_SAMPLER}; {_TPU_RUNNER}",
        neutral=(False,),
        aliases=(Alias("top_logprobs", neutral=(0,)),),
    ),
    # It raises in the step, which ends the engine.
    FieldRow(
        "prompt_logprobs",
        HONOURED,
        FieldOutcome(
            State.FATAL,
            "engines on TPU have no log-probabilities of prompts for a model that speculates or "
            "takes more than text",
            (Trait.SPECULATES, Trait.TAKES_MEDIA),
        ),
        _NO_LOGPROBS,
        f"vllm/v1/worker/gpu_model_runner.py; {_TPU_RUNNER}",
        neutral=(False,),
    ),
    _unreachable("prompt_logprob_token_ids"),
    _unreachable("prompt_logprob_start"),
    # With drafted tokens the likeliest ones are gathered only. tpu-inference gathers these too, and
    # the frontend would wait for the others.
    FieldRow(
        "logprob_token_ids",
        FieldOutcome(
            State.LACKING,
            "engines that speculate have log-probabilities of the likeliest tokens only",
            (Trait.SPECULATES,),
        ),
        FieldOutcome(
            State.LACKING, "engines on TPU have log-probabilities of the likeliest tokens only"
        ),
        _NO_LOGPROBS,
        f"{_SAMPLER}; vllm/v1/sample/rejection_sampler.py; {_TPU_RUNNER}",
        neutral=([],),
        instead="logprobs is honoured",
    ),
    _unreachable("flat_logprobs", (False,)),
    _internal("detokenize"),
    _by_gateway("skip_special_tokens", _DETOKENIZER),
    _by_gateway("spaces_between_special_tokens", _DETOKENIZER),
    _by_gateway("include_stop_str_in_output", _DETOKENIZER),
    _internal("output_kind"),
    _by_gateway("stream_interval", _OUTPUT),
    _internal("skip_clone"),
    _internal("output_text_buffer_length"),
    _internal("_eos_token_id"),
    _internal("_all_stop_token_ids"),
    _internal("_watermarking_skipped"),
    # Its masks are by the request's place in the batch. With data parallelism rows of logits are by
    # group; it skips the warm-up of grammars there, and says that they are not supported. With
    # drafted tokens a request has several rows of logits and several masks, of which it takes one.
    FieldRow(
        "structured_outputs",
        HONOURED,
        FieldOutcome(
            State.LACKING,
            "engines on TPU that compute with data parallelism, or speculate, keep no grammar",
            (Trait.DATA_PARALLEL, Trait.SPECULATES),
        ),
        MADE_UP,
        "vllm/v1/structured_output; tpu_inference/runner/compilation_manager.py; "
        "tpu_inference/runner/structured_decoding_manager.py",
        neutral=({},),
        aliases=(Alias("response_format", key="type", passes=("text",)),),
    ),
    FieldRow(
        "logit_bias",
        _SPECULATING,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"{_PROCESSORS}; {_PARAMS}; {_TPU_BATCH}",
        neutral=({},),
    ),
    # Its batch calls `jnp.zeros` with two shapes, a `TypeError` in the step that ends the engine,
    # and the next one that gets the request (run 2026-11-22).
    FieldRow(
        "allowed_token_ids",
        HONOURED,
        FieldOutcome(State.FATAL, "engines on TPU cannot restrict the tokens of a request"),
        MADE_UP,
        f"{_BATCH}; {_TPU_BATCH}",
        neutral=([],),
        instead="structured_outputs is honoured",
    ),
    FieldRow("extra_args", STEERING, STEERING, STEERING, _PARAMS),
    FieldRow(
        "bad_words",
        HONOURED,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"vllm/v1/sample/ops/bad_words.py; {_TPU_BATCH}",
        neutral=([],),
    ),
    _internal("_bad_words_token_ids"),
    _internal("skip_reading_prefix_cache"),
    # It is kept by the sampler, of which tpu-inference has its own.
    FieldRow(
        "thinking_token_budget",
        HONOURED,
        _IGNORED_ON_TPU,
        MADE_UP,
        f"vllm/v1/sample/thinking_budget_state.py; {_TPU_SAMPLER}",
        neutral=(-1,),
        aliases=(Alias("thinking", key="type", passes=("disabled", "adaptive")),),
        instead="max_tokens bounds the whole answer",
    ),
    _honoured("repetition_detection", _STOP),
    FieldRow(
        "routed_experts_prompt_start",
        FieldOutcome(
            State.IGNORED,
            "the engines of this model return no routed experts",
            (Trait.LISTS_NO_EXPERTS,),
        ),
        _IGNORED_ON_TPU,
        MADE_UP,
        "vllm/distributed/aux_output_connector/connector.py; tpu_inference/runner",
        neutral=(0,),
    ),
    _unreachable("trace_decode_token_ids"),
)
