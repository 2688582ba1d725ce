"""The fleet page in a process of its own: the present state of the fleet, and its last hour."""
