"""Adds what an engine on TPU needs beside vLLM: its settings, its worker, its compiled programs."""
