"""Exporters: the reports of the hardware as Prometheus metrics."""
