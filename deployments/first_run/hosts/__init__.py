"""What is done on the hosts of a run, and how they are reached."""
