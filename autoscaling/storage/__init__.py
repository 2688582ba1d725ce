"""What the policy keeps beyond its own process: the plan for all to see, its memory, decisions."""
