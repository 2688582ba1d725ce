"""Remembers for a whole Ray cluster that its gateways were opened: one key in Ray's own store.

The store outlives gateways, and a head that comes back. A second cluster of a RayService, and one
whose Redis was lost, begins without the key. Each call blocks for a round trip to Ray's head.
"""

from ray.exceptions import RayError
from ray.experimental import internal_kv

_KEY = b"slicewise:gateways-open"


class OpenLatch:
    """The latch of the Ray cluster that this process belongs to. Nothing closes it."""

    def is_set(self) -> bool:
        """Returns whether some gateway has opened the cluster.

        Raises:
            ConnectionError: Ray's head is away. Ask again later.
        """
        try:
            value: bytes | None = internal_kv._internal_kv_get(_KEY)
        except (RuntimeError, RayError) as error:
            raise ConnectionError(f"Ray's head is away: {error!r}") from error
        return value is not None

    def set(self) -> None:
        """Opens the cluster; a no-op if it is open.

        Raises:
            ConnectionError: Ray's head is away. Try again later.
        """
        try:
            internal_kv._internal_kv_put(_KEY, b"1", overwrite=True)
        except (RuntimeError, RayError) as error:
            raise ConnectionError(f"Ray's head is away: {error!r}") from error
