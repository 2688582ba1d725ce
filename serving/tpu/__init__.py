"""What vLLM on TPU needs to be told for a model on a slice, and whether it fits. Pure."""
