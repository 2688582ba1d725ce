"""Keeps operators' orders in the key-value store of Ray's head. Imports Ray.

Owns the calls. An address that nobody answers at is an error within seconds.
"""

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient  # type: ignore[attr-defined] # Cython has no stubs

from autoscaling.orders.errors import OrdersUnusableError
from serving.domain.supply.keys import SupplyKeys

_TIMEOUT_S = 5.0


class RayOrderStore:
    """The store of one application.

    Raises:
        OrdersUnusableError: Ray's head is not there. Every method raises it too.
    """

    def __init__(self, ray_address: str, application: str) -> None:
        self._keys = SupplyKeys(application)
        try:
            self._gcs = GcsClient(address=canonicalize_bootstrap_address_or_die(ray_address))
        except (RuntimeError, ConnectionError, SystemExit, ray.exceptions.RayError) as error:
            raise OrdersUnusableError(f"no Ray head at {ray_address}: {error}") from error

    def read_orders(self) -> bytes | None:
        """Returns the stored orders; `None` if nobody ever gave one."""
        return self._get(self._keys.orders)

    def read_supply(self) -> bytes | None:
        """Returns the directory's last report of slices; `None` if there is none."""
        return self._get(self._keys.supply)

    def write_orders(self, text: bytes) -> None:
        """Stores the orders."""
        try:
            self._gcs.internal_kv_put(self._keys.orders, text, overwrite=True, timeout=_TIMEOUT_S)
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise OrdersUnusableError(f"Ray's head does not take the order: {error}") from error

    def _get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._gcs.internal_kv_get(key, timeout=_TIMEOUT_S)
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise OrdersUnusableError(f"Ray's head is away: {error}") from error
        return value
