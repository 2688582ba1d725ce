"""Exporters: what the hardware says of itself, as Prometheus metrics."""
