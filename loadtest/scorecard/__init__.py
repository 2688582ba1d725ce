"""From the records of a run to what they mean: scorecard, verdict, report, comparison."""
