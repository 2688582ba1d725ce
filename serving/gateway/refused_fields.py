"""Fields of a request that an engine cannot honour, refused before they reach it.

Owns which they are and the check of a body. An engine that was asked would fail with no word to the
client, and to drop a field in silence would change what was asked for. Pure.
"""

from collections.abc import Mapping

import msgspec

from serving.errors import MalformedRequestError

# tpu-inference 0.32.0 raises `JAX does not support per-request seed.` in `validate_request`, which
# came back as a 500 with an empty message (`platforms/tpu_platform.py`, read and run 2026-11-21).
ON_TPU: Mapping[str, str] = {
    "seed": "Engines on TPU have no seed per request; leave it out, or send temperature 0 for "
    "output that repeats."
}

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_fields(body: bytes, refused: Mapping[str, str]) -> None:
    """Lets a body pass in which none of the `refused` fields has a value; they map to the reason.

    A body that is not a JSON object passes as well: whoever reads it says what is wrong with it.

    Raises:
        MalformedRequestError: one has. The client must change the request.
    """
    if not refused:
        return
    try:
        fields = _FIELDS.decode(body)
    except msgspec.DecodeError:
        return
    for name, reason in refused.items():
        if bytes(fields.get(name, msgspec.Raw(b"null"))).strip() != b"null":
            raise MalformedRequestError(reason, param=name, code="unsupported_parameter")
