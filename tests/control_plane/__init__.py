"""Our manifests against a real kube-apiserver with the real CRDs, started for the tests alone."""
