"""Simulates the platform by discrete events and runs the production policy.

It has no scaling rule of its own: `run.simulate` asks a `records.Policy` as production does.
"""
