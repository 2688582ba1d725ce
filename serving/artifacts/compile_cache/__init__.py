"""Keeps an engine's compiled programs in a store, shared by all slices that can use them."""
