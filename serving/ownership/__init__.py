"""Who owns an engine: its lease, the control port of its host, and what a successor needs."""
