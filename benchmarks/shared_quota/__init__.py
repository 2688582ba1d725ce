"""Two models that have a quota of chips together: simulated days, and the page about them."""
