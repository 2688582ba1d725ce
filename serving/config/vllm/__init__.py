"""Reads the arguments that vLLM itself takes, and what they may not say here."""
