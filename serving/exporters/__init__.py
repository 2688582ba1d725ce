"""The TPU exporter: what the chips of a host report, as Prometheus metrics."""
