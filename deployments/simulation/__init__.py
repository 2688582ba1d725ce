"""Simulates a TPU cluster here: real Ray nodes with the labels and chips of simulated slices."""
