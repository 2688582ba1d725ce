"""What can be wrong with a folder of manifests: with each, and between them. Needs no cluster."""
