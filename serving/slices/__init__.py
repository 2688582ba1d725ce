"""Whole TPU slices: their states, how they are found, reserved, probed, watched and released."""
