"""Implements `slicewise doctor`: it reports what an environment lacks, and what to do about it."""
