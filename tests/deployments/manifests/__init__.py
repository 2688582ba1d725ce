"""Manifests: values files, rendering, validation."""
