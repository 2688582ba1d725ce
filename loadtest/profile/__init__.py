"""`slicewise profile`: what one slice carries at an objective, for the autoscaler to plan with."""
