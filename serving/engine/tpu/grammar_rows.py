"""Puts the masks of grammars in the order in which tpu-inference reads them.

vLLM's scheduler hands over one mask for each request under a grammar, in the order of the requests'
ids beside them. tpu-inference sorts the ids and takes the masks as they come; an id that is not in
its batch it passes over, but not the mask (0.32.0, `runner/structured_decoding_manager.py`, read
2026-11-26). With two such requests in a step, each may get the other's mask: its grammar then
rejects the token, and vLLM ends the request with an error (run on JAX CPU, 2026-11-26). Pure.
"""

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def rows_as_read(
    request_ids: Sequence[str], masks: npt.NDArray[Any], batch: Container[str]
) -> tuple[list[str], npt.NDArray[Any]]:
    """Returns ids and masks such that a reader who sorts the ids has each one's own mask.

    `masks` has one row for each of `request_ids`. What is not in `batch` is left out of both.
    """
    order = sorted(
        (place for place, name in enumerate(request_ids) if name in batch),
        key=lambda place: request_ids[place],
    )
    return [request_ids[place] for place in order], np.asarray(masks)[order]
