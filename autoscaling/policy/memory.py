"""What a policy knows beyond its own life, as one small document: what slices were seen to carry.

Owns the form. Does not own what is in a model's record (`learned_capacity`), nor where the document
is kept. Pure.
"""

import json
from collections.abc import Mapping
from typing import Any

FORMAT = 1


class PolicyMemoryError(ValueError):
    """The document is no memory of this version. Begin with an empty one."""


def encode_memory(records: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Encodes the records of models by name, as JSON."""
    return json.dumps({"format": FORMAT, "models": records}, sort_keys=True).encode()


def decode_memory(text: bytes) -> dict[str, Mapping[str, Any]]:
    """Returns the records of models in what `encode_memory` made.

    Raises:
        PolicyMemoryError: `text` is no such document.
    """
    try:
        document = json.loads(text)
        models = dict(document["models"])
        version = document["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyMemoryError(f"not a memory of the policy: {error!r}") from error
    if version != FORMAT:
        raise PolicyMemoryError(f"format is {version!r}; allowed: {FORMAT}")
    return models
