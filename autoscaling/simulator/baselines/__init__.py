"""Implements other projects' autoscaling for comparison: a module each, formula and source on top.

All of them are given the same fair parameters (`sizing`), and the same compute classes. A policy
without classes keeps prepaid slices, which cost the same used or not, and takes the rest on demand.
"""
