"""Says what applying manifests would do to the cluster that runs, before anything is done."""
