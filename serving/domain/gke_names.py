"""The names that GKE, KubeRay and we use on nodes, pods and worker groups. A leaf."""

# Ours, on a worker group: the compute class as `serve_config.yaml` calls it. Without it, GKE's name
# for the class counts.
COMPUTE_CLASS_LABEL = "slicewise.io/compute-class"
GKE_COMPUTE_CLASS = "cloud.google.com/compute-class"
GKE_ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
GKE_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GKE_CHIPS = "google.com/tpu"
# Which host of its slice a pod is. KubeRay sets it on slices of several hosts; on those of one it
# is ours: without it the TPU webhook counts by itself, and names a new slice like a living one.
# Source: recorded from KubeRay 1.7.0 and kuberay-tpu-webhook 1.3.5 on 2026-11-22. Webhooks before
# v1.3.0 do not read it.
HOST_INDEX_LABEL = "ray.io/replica-host-index"
# The idle timeout of slices, 116 days: only the slice provisioner decides how many there are, so
# Ray's autoscaler must never find one idle.
NEVER_IDLE_S = 10_000_000
