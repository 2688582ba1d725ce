"""The fleet page of gateways: what is where now, and how it was lately."""
