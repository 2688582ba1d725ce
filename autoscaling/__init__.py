"""Decides how many slices of which class there are: pure modules decide, adapters carry it out."""
