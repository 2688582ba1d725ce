"""Renders Kubernetes manifests from one values file. Needs no cluster."""
