"""The fleet page in a process of its own: what is where now, and how it was lately."""
