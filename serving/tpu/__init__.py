"""Plans vLLM on TPU for a model on a slice: its settings, and whether it fits. Pure."""
