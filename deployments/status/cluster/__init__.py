"""What Kubernetes says of the pods, machines, quotas and classes of one RayCluster, by kubectl."""
