"""Translates vLLM's request and output records to and from the token link's messages.

Both ends of the link import this and nothing else of each other. Values that the link understands
travel as plain fields; the rest of a record is vLLM's own msgpack encoding, opaque to the link.

Tokens travel once: the payload of a request leaves its prompt out. Most outputs carry tokens only
and have no payload at all.

The emitted tokens of a request come from `TokenRequest.emitted_token_ids` and from nowhere else.
vLLM fills `SamplingParams.extra_args` from the body of an HTTP request, so the names that are ours
are taken out of it at both ends.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from serving.link.messages import RESERVED_ARG_PREFIX, TokenOutput, TokenRequest

# The key in `SamplingParams.extra_args` under which a resumed request carries, inside the engine
# only, the tokens that it had already emitted elsewhere.
EMITTED_KEY = f"{RESERVED_ARG_PREFIX}emitted_token_ids"


def _join(buffers: Sequence[Any]) -> list[bytes]:
    return [bytes(buffer) for buffer in buffers]


def _bytes_of(buffer: Any) -> Any:
    """Returns bytes as they are, and a view, whose length is its bytes, of everything else."""
    return buffer if isinstance(buffer, bytes) else memoryview(buffer).cast("B")


def encode_request(request: EngineCoreRequest, encoder: MsgpackEncoder) -> list[bytes]:
    """Returns the opaque part of `request`; its prompt tokens are left to `TokenRequest`.

    Images and other large parts are not copied: the payload reads them from the memory of
    `request`, where requests that share a medium, such as the answers of one, share it too.
    """
    prompt_token_ids = request.prompt_token_ids
    request.prompt_token_ids = None
    try:
        with _without_reserved(request.sampling_params):
            return [_bytes_of(buffer) for buffer in encoder.encode(request)]
    finally:
        request.prompt_token_ids = prompt_token_ids


@contextmanager
def _without_reserved(params: SamplingParams | None) -> Iterator[None]:
    """Takes our arguments out of `params`, then restores it: siblings (`n > 1`) share it."""
    if params is None:
        yield
        return
    extra_args = params.extra_args
    params.extra_args = _clients_own(extra_args)
    try:
        yield
    finally:
        params.extra_args = extra_args


def _clients_own(extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the arguments that a client may set; `None` if there are none."""
    kept = {
        name: value
        for name, value in (extra_args or {}).items()
        if not name.startswith(RESERVED_ARG_PREFIX)
    }
    return kept or None


def decode_request(message: TokenRequest, decoder: MsgpackDecoder) -> EngineCoreRequest:
    """Returns the request as the engine core takes it, emitted tokens in `extra_args`.

    Emitted tokens in the payload are dropped: only the message's own field counts.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: the payload is not vLLM's. Fail the request.
    """
    request: EngineCoreRequest = decoder.decode(message.payload)
    # Each attempt has an id of its own; the payload has that of the first.
    request.request_id = message.request_id
    request.prompt_token_ids = message.prompt_token_ids
    params = request.sampling_params
    if params is not None:
        params.extra_args = _clients_own(params.extra_args)
        if message.emitted_token_ids:
            emitted = {EMITTED_KEY: message.emitted_token_ids}
            params.extra_args = (params.extra_args or {}) | emitted
    return request


def emitted_token_ids(params: SamplingParams | None) -> list[int] | None:
    """Returns the tokens a resumed request had already emitted; `None` for one that starts here."""
    if params is None or params.extra_args is None:
        return None
    emitted: list[int] | None = params.extra_args.get(EMITTED_KEY)
    return emitted


def _has_more_than_tokens(output: EngineCoreOutput) -> bool:
    return (
        output.new_logprobs is not None
        or output.prefill_stats is not None
        or output.events is not None
        or output.pooling_output is not None
        or output.new_prompt_logprobs_tensors is not None
        or output.spec_decode_metrics is not None
        or output.kv_transfer_params is not None
        or output.ec_transfer_params is not None
        or output.trace_headers is not None
        or output.routed_experts is not None
        or output.num_nans_in_logits != 0
        or output.mm_cache_miss_hashes is not None
        or output.new_sampling_mask is not None
        or output.prompt_token_id_logprobs is not None
    )


def _shift_events(output: EngineCoreOutput, offset_s: float) -> None:
    for event in output.events or ():
        event.timestamp += offset_s


def encode_outputs(
    outputs: Sequence[EngineCoreOutput],
    encoder: MsgpackEncoder,
    clock: Callable[[], float] = time.monotonic,
) -> list[TokenOutput]:
    """Returns one step's outputs for the link. Event times become ages: no clock is shared."""
    messages = []
    for output in outputs:
        payload = None
        if _has_more_than_tokens(output):
            _shift_events(output, -clock())
            payload = _join(encoder.encode(output))
        finish, prefill = output.finish_reason, output.prefill_stats
        messages.append(
            TokenOutput(
                output.request_id,
                output.new_token_ids,
                None if finish is None else int(finish),
                output.stop_reason,
                payload,
                None if prefill is None else prefill.num_cached_tokens,
            )
        )
    return messages


def decode_output(
    message: TokenOutput, decoder: MsgpackDecoder, clock: Callable[[], float] = time.monotonic
) -> EngineCoreOutput:
    """Returns the output as vLLM's frontend takes it, under the message's present id."""
    finish = None if message.finish is None else FinishReason(message.finish)
    if message.payload is None:
        num_cached = message.num_cached  # of an engine that is not vLLM
        return EngineCoreOutput(
            message.request_id,
            message.token_ids,
            finish_reason=finish,
            stop_reason=message.stop_reason,
            prefill_stats=None
            if num_cached is None
            else PrefillStats(num_cached_tokens=num_cached),
        )
    output: EngineCoreOutput = decoder.decode(message.payload)
    output.request_id = message.request_id
    _shift_events(output, clock())
    return output


def request_decoder() -> MsgpackDecoder:
    """Returns a decoder for `decode_request`; not thread-safe."""
    return MsgpackDecoder(EngineCoreRequest)


def output_decoder() -> MsgpackDecoder:
    """Returns a decoder for `decode_output`; not thread-safe."""
    return MsgpackDecoder(EngineCoreOutput)
