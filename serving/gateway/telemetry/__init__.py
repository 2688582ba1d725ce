"""Counts, times and traces requests while a gateway serves them."""
