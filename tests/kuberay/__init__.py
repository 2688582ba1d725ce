"""KubeRay and GKE on this machine: a Kubernetes API over HTTPS, an operator, a cloud, real raylets.

Real: HTTP, TLS and JSON patch on the wire; Ray's head, raylets, autoscaler v2 and KubeRayProvider,
unpatched, in the process that a head pod runs them in. Emulated: the API server's paths that are
used here, KubeRay 1.7's rules for worker groups of several hosts, GKE's delivery of whole slices.
Without `raylets` and `cluster` nothing here needs Ray.
"""
