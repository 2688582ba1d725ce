"""The hosts of a simulated cluster: what each has for itself, and the Ray node on it."""
