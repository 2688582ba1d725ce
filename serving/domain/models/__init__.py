"""What is known of a served model: its version, its engines' kind, and what they do with requests."""
