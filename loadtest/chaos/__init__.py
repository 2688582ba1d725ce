"""Disturbs the platform on purpose while it is under load."""
