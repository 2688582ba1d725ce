"""What is wrong in a fleet, from what was read of it: pure decisions, and their words."""
