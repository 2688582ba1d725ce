"""Names that others have to know too: of Kubernetes objects, and of Serve deployments."""
