"""What policies have learned of slices, as one small document that outlives them.

Owns the form. Does not own what is in a model's record (`learned_capacity`), nor where the document
is kept. Pure.
"""

import json
from collections.abc import Mapping
from typing import Any

FORMAT = 1


class LearnedDocumentError(ValueError):
    """The document is not in the form of this version. Begin with an empty one."""


def encode_learned(records: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Encodes the records of models by name, as JSON."""
    return json.dumps({"format": FORMAT, "models": records}, sort_keys=True).encode()


def decode_learned(text: bytes) -> dict[str, Mapping[str, Any]]:
    """Returns the records of models in what `encode_learned` made.

    Raises:
        LearnedDocumentError: `text` is no such document.
    """
    try:
        document = json.loads(text)
        models = dict(document["models"])
        version = document["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise LearnedDocumentError(f"not what a policy has learned: {error!r}") from error
    if version != FORMAT:
        raise LearnedDocumentError(f"format is {version!r}; allowed: {FORMAT}")
    return models
