"""How much of its profile's law a slice carries: what is shown, and what is believed of it."""
