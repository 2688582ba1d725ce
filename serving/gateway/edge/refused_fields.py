"""Refuses fields of a request that an engine cannot honour, or that no client may set.

Owns which they are and the check of a body. An engine that got such a field would fail and give the
client no reason. A field that is dropped in silence would change the request. Pure.
"""

import re
from collections.abc import Mapping

import msgspec

from serving.domain.errors import MalformedRequestError
from serving.link.messages import RESERVED_ARG_PREFIX

# What a request may be called: its id is logged, echoed and sent with every token, so it may
# neither carry line ends nor grow without bound.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

# tpu-inference 0.32.0 raises `JAX does not support per-request seed.` in `validate_request`, which
# came back as a 500 with an empty message (`platforms/tpu_platform.py`, read and run 2026-11-21).
ON_TPU: Mapping[str, str] = {
    "seed": "Engines on TPU have no seed per request; leave it out, or send temperature 0 for "
    "output that repeats.",
    # Its batch calls `jnp.zeros` with two shapes, a `TypeError` in the step that ends the engine,
    # and the next one that gets the request (`runner/input_batch.py`, run 2026-11-22).
    "allowed_token_ids": "Engines on TPU cannot restrict the tokens of a request; leave it out, or "
    "send structured_outputs.",
    # It gives log-probabilities of the likeliest tokens only, and the frontend waits for these.
    "logprob_token_ids": "Engines on TPU have log-probabilities of the likeliest tokens only; "
    "send logprobs.",
}
# Refused on a TPU if the model speculates or takes more than text: tpu-inference 0.32.0 raises in
# the step, which ends the engine (`runner/tpu_runner.py`, read 2026-11-22).
PROMPT_LOGPROBS = "prompt_logprobs"
ON_TPU_WITHOUT_PROMPT_LOGPROBS: Mapping[str, str] = {
    **ON_TPU,
    PROMPT_LOGPROBS: "Engines on TPU have no log-probabilities of prompts for this model, which "
    "speculates or takes more than text; leave them out, and echo with logprobs.",
}
# `extra_args` that vLLM reads and that have fields of their own, where their types are checked. An
# engine with a KV connector calls methods of what it finds there.
_FIELDS_OF_THEIR_OWN = frozenset({"kv_transfer_params", "ec_transfer_params"})

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_fields(body: bytes, refused: Mapping[str, str]) -> None:
    """Refuses a body in which a field of `refused` has a value; `refused` maps names to reasons.

    `null` and an empty list are no values: clients send them for fields they do not ask for. A body
    that is not a JSON object passes as well: its reader reports the fault.

    Raises:
        MalformedRequestError: a field has one. The client must change the request.
    """
    if not refused:
        return
    try:
        fields = _FIELDS.decode(body)
    except msgspec.DecodeError:
        return
    for name, reason in refused.items():
        if _value(fields, name) not in (None, []):
            raise MalformedRequestError(reason, param=name, code="unsupported_parameter")
    if PROMPT_LOGPROBS in refused and _echoes_logprobs(fields):
        reason = refused[PROMPT_LOGPROBS]
        raise MalformedRequestError(reason, param="echo", code="unsupported_parameter")


def _echoes_logprobs(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Returns whether vLLM adds prompt log-probabilities; in a chat it does for every echo."""
    if not _value(fields, "echo"):
        return False
    return "messages" in fields or _value(fields, "logprobs") is not None


def _value(fields: Mapping[str, msgspec.Raw], name: str) -> object:
    return msgspec.json.decode(fields[name]) if name in fields else None


def check_open_arguments(arguments: object) -> None:
    """Refuses a request's `vllm_xargs` if they hold an argument that clients may not set.

    A value that is no mapping passes, because vLLM reports the fault.

    Raises:
        MalformedRequestError: they hold such an argument. The client must leave it out.
    """
    for name in arguments if isinstance(arguments, dict) else ():
        if str(name).startswith(RESERVED_ARG_PREFIX):
            allowed = f"names that begin with {RESERVED_ARG_PREFIX} are not for clients"
        elif name in _FIELDS_OF_THEIR_OWN:
            allowed = "it is a field of the request itself"
        else:
            continue
        message = f"vllm_xargs: {str(name)[:80]!r} cannot be set here: {allowed}; leave it out."
        raise MalformedRequestError(message, param="vllm_xargs", code="unsupported_parameter")


def check_request_id(request_id: object) -> None:
    """Refuses a body's `request_id` that is unfit to be logged, echoed and sent with every token.

    A value that is no text passes, because vLLM reports the fault.

    Raises:
        MalformedRequestError: the id is unfit. The client must send another, or none.
    """
    if isinstance(request_id, str) and not REQUEST_ID.fullmatch(request_id):
        message = (
            f"request_id: {request_id[:40]!r} has {len(request_id)} characters; allowed: 1 to 128 "
            "letters, digits and . _ : -"
        )
        raise MalformedRequestError(message, param="request_id")
