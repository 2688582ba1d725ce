"""Carries batches on: who does, step by step, and line by line."""
