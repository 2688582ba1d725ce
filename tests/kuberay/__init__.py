"""KubeRay and GKE on this machine, as clients of a real Kubernetes control plane.

Real (`tests/control_plane`): etcd, API server with KubeRay's and GKE's CRDs, admission, accounts
and their rights, garbage collection, quotas, endpoints, scheduler; KWOK in the place of kubelets.
With `cluster` and `raylets` also Ray's head, raylets, autoscaler v2 and KubeRayProvider, unpatched,
in the process that a head pod runs them in.

Emulated: KubeRay's operator (`operator`, `service_controller` and the pure parts below them), the
TPU webhook (`webhook`, `webhook_server`), GKE's delivery and loss of hosts (`cloud`), Ray's
dashboard (`dashboard`). `test_conformance` holds operator and webhook against recordings of the
real ones.

By hand (`by_hand`) they move when they are told to; `ClusterByHand.running` lets them move by
themselves. Without `raylets` and `cluster` nothing here needs Ray.
"""
