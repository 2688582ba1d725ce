"""Stores of each kind; see `servers`."""

from tests.artifacts.object_store.servers import any_store, store_server

__all__ = ["any_store", "store_server"]
