"""A TPU cluster on this machine: real Ray nodes with the labels and chips of simulated slices."""
