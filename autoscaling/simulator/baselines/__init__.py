"""Implements other projects' autoscaling for comparison: a module each, formula and source on top.

All of them are given the same fair parameters (`sizing`), the same compute classes, and the fleet
that is there when they begin. A policy without classes keeps prepaid slices, which cost the same
used or not, and takes the rest on demand (`single_class`) or on a ladder as GKE has it (`ladder`).
"""
