"""Runs one load test: from the command line to its records, over several worker processes."""
