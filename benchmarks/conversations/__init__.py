"""Conversations at two gateways and four engines: real ones beside the simulation, and vLLM's.

`python -m benchmarks conversations` runs it, and `docs/results/conversations.md` shows it.
"""
