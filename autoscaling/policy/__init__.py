"""The autoscaling policy: load to slices, slices to compute classes. Pure; two callers, no twin."""
