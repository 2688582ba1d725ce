"""The paced engine: tokens by a formula, at instants by the step-time model; for tests."""
