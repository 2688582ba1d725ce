"""Gives a slice back: removes its placement group, which ends everything that runs in it.

A group is detached: it stands until somebody removes it. That is the owner of the engine, the
engine host once nobody came for it, or the directory where neither is left.
"""

import logging

from ray._raylet import PlacementGroupID
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, remove_placement_group

logger = logging.getLogger(__name__)

# Of the names of our groups in Ray.
GROUP_PREFIX = "slicewise:"


def placement_group(group_id: str) -> PlacementGroup:
    """Returns the handle of the group with this id, in hexadecimal."""
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))


def remove_group(group_id: str) -> None:
    """Removes the group; returns when Ray's head has, however long there is no head. Idempotent.

    Measured with Ray 2.60: a removal that timed out while the head was away is not made good when
    it is back. The group stands, and nobody has the slice.
    """
    while True:
        try:
            remove_placement_group(placement_group(group_id))
        except GetTimeoutError:
            logger.warning("release_waits reason='Ray has no head'")
        else:
            return
