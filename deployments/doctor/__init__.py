"""`slicewise doctor`: what an environment lacks for Slicewise, and what to do about it."""
