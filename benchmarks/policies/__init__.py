"""Autoscaling policies beside each other: `python -m benchmarks policies`, simulated.

`cases` are the days, `worlds` what is otherwise than expected in them, `jobs` what is to be run and
in which order. Each run becomes one line of `records`; `report` makes the page of them.
"""
