"""Models and shapes of one fleet: simulated days, and the page about them.

`quota_days` has two models over chips that they share, `shape_days` a model that may have slices of
two shapes. `report` runs all and writes `docs/results/one-fleet.md` from the record.
"""
