"""Runs the published tpu-inference on JAX CPU, with its needs of a TPU replaced by name."""
