"""What becomes of an answer on its way to the client: its head, its errors, its end."""
