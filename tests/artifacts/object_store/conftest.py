"""Stores of each kind; see `servers`."""

from tests.artifacts.object_store.servers import (
    any_store,
    store_server,
    strict_bucket,
    versioned_store,
)

__all__ = ["any_store", "store_server", "strict_bucket", "versioned_store"]
