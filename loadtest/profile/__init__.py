"""Measures what one slice carries at an objective, for the autoscaler: `slicewise profile`."""
