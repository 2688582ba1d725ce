"""The supply of slices: which incarnations exist, who has each, and what is held against it."""
