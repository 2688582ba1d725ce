"""The Kubernetes objects that plans need: read once, or kept current by a watch."""
