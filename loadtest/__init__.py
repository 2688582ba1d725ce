"""Load tests: what is sent and when, the client that sends it, and the scorecard of the run."""
