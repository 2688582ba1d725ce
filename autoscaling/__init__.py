"""How many slices there are, and which: decided in pure modules, carried out at the rim."""
