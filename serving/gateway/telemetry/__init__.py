"""What is counted, timed and traced of requests while a gateway serves them."""
