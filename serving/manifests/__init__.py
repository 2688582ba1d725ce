"""Kubernetes manifests from one values file, and what can be wrong with them. Needs no cluster."""
