"""vLLM as an engine of ours, and what we add to its processes."""
