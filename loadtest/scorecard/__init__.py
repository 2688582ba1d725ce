"""Turns the records of a run into scorecard, verdict, report and comparison."""
