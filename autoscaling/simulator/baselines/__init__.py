"""Other people's autoscaling, to compare with: one module each, its formula and source on top.

All of them are given the same fair parameters (`sizing`), and the same compute classes. What knows
no classes keeps prepaid slices, which cost the same used or not, and takes the rest on demand.
"""
