"""Puts this folder on the path: tests below it import `golden_server` and `made_run`."""
