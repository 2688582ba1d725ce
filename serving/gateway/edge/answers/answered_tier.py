"""vLLM's answers name the tier that a request was served as, in `service_tier`.

Owns that one field of the answers of chat, completions and responses, where vLLM's own types have
it. vLLM leaves it empty, or repeats what was asked for. Chunks of streamed chats and completions,
and Anthropic's messages, have no such field in vLLM and stay as they are.
"""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT


def name_tiers(state: Any) -> None:
    """Has vLLM's application with this `state` name the tiers of its answers.

    Outside of a request of the edge, which alone knows the tier, an answer stays as it was.
    """
    # A pooling model has none of them.
    if (chat := getattr(state, "openai_serving_chat", None)) is not None:
        _name_in_chats(chat)
    if (completion := getattr(state, "openai_serving_completion", None)) is not None:
        _name_in_completions(completion)
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        _name_in_responses(responses)


def _name_in_chats(serving: Any) -> None:
    make_answer = serving.chat_completion_full_generator

    async def named(*args: Any, **kwargs: Any) -> Any:
        answer = await make_answer(*args, **kwargs)
        if isinstance(answer, ChatCompletionResponse):  # else it is an error
            _name(answer)
        return answer

    serving.chat_completion_full_generator = named


def _name_in_completions(serving: Any) -> None:
    make_answer = serving.request_output_to_completion_response

    def named(*args: Any, **kwargs: Any) -> Any:
        return _name(make_answer(*args, **kwargs))

    serving.request_output_to_completion_response = named


def _name_in_responses(serving: Any) -> None:
    create = serving.create_responses

    async def named(request: Any, *args: Any, **kwargs: Any) -> Any:
        # From which vLLM copies it into each record of the answer, those of a stream too.
        return await create(_name(request), *args, **kwargs)

    serving.create_responses = named


def _name(record: Any) -> Any:
    """Sets the tier in a record of vLLM's, and returns the record."""
    if (context := REQUEST_CONTEXT.get()) is not None:
        record.service_tier = context.service_tier.value
    return record
