"""Runs the published tpu-inference on JAX CPU: what it needs of a TPU is replaced, by name."""
