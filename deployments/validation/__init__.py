"""Checks a folder of manifests: each one, and their relations. Needs no cluster."""
