"""What GKE, KubeRay and we call things on nodes, pods and worker groups. A leaf: names only."""

# Ours, on a worker group: the compute class as `serve_config.yaml` calls it. Without it, GKE's name
# for the class counts.
COMPUTE_CLASS_LABEL = "slicewise.io/compute-class"
GKE_COMPUTE_CLASS = "cloud.google.com/compute-class"
GKE_ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
GKE_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GKE_CHIPS = "google.com/tpu"
# Slices whose count only the slice provisioner decides: Ray's autoscaler never finds them idle
# (116 days).
NEVER_IDLE_S = 10_000_000
