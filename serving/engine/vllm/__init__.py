"""Runs vLLM as an engine of ours, and holds our additions to its processes."""
