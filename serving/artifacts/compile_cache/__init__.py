"""Compiled programs of an engine, kept in a store and shared by all slices that can use them."""
