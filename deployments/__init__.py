"""Deploys Slicewise and operates it: the `slicewise` command and its parts."""
