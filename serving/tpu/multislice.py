"""Sets up slices joined under one engine over the data-centre network.

Owns the environment by which libtpu finds the other slices, and how the end of one is recorded for
each. Does not own which slices are joined (`pending_grants`), nor what the engine does with them
(`serving.tpu.settings`). Pure.

Names of the variables and the port: Ray 2.60 `util/tpu.py` (`get_tpu_coordinator_env_vars`), read
2026-11-22. Which of them libtpu demands was not tried: nothing here has run on a TPU.
"""

import json
from collections.abc import Mapping, Sequence

from serving.domain.inventory import Slice
from serving.domain.slice_lifecycle import EndCause
from serving.tpu.rules import SLICE_IDS_VARIABLE

# Ray's own choice: KubeRay has metrics on 8080. A host belongs to one engine, which has it alone.
MEGASCALE_PORT = 8081
SLICE_ID = "MEGASCALE_SLICE_ID"

End = tuple[EndCause, str]


def multislice_environment(slices: Sequence[Slice]) -> dict[str, str]:
    """Returns the variables for every process of an engine over `slices`; none for a single slice.

    The slices are numbered in their order; the first host of the first is where they meet. One
    environment goes to all workers, so it has the slice of every host.
    """
    if len(slices) == 1:
        return {}
    ids = {host.node_id: part for part, whole in enumerate(slices) for host in whole.hosts}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": slices[0].hosts[0].address,
        "MEGASCALE_PORT": str(MEGASCALE_PORT),
        "MEGASCALE_NUM_SLICES": str(len(slices)),
        SLICE_IDS_VARIABLE: json.dumps(ids, sort_keys=True),
    }


def own_environment(environment: Mapping[str, str], node_id: str) -> dict[str, str]:
    """Returns the variables that one worker adds: its host's slice. None for a single slice.

    Raises:
        KeyError: its host is in none of the slices: it was not placed by their reservation.
    """
    slice_ids = environment.get(SLICE_IDS_VARIABLE)
    if slice_ids is None:
        return {}
    return {SLICE_ID: str(json.loads(slice_ids)[node_id])}


def multislice_ends(
    names: Sequence[str], own: Mapping[int, End], cause: EndCause, reason: str
) -> tuple[End, ...]:
    """Returns how each slice's life ends when the engine leaves all for `cause` and `reason`.

    `own` are the slices that have an end of their own, by their place. The others are whole: they
    are given back. A slice alone ends as the engine does, and so do slices if none is to blame.
    """
    if len(names) == 1 or not own:
        return tuple((cause, reason) for _ in names)
    blamed = min(own)
    others = (EndCause.RELEASED, f"it was joined with {names[blamed]}: {own[blamed][1]}")
    return tuple(own.get(part, others) for part in range(len(names)))
