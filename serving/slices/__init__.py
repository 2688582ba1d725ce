"""The code of whole TPU slices: how they are found, reserved, probed, watched and released."""
