"""What is done to the platform on purpose while it is under load, and when."""
