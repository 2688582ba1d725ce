"""The fleet page in a process of its own: the present places of everything, and the recent past."""
