"""Runs load tests: the workload, the client that sends it, and the scorecard of the run."""
