"""A real Kubernetes control plane for tests, and our manifests against it with the real CRDs."""
