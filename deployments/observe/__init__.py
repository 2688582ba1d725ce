"""Runs Prometheus on the machine that serves: `slicewise observe`."""
