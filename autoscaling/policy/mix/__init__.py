"""Which compute classes bring the slices of a need. Pure."""
