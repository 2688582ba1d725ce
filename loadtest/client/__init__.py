"""The client of a load test: requests over HTTP, read token by token, and their answers checked."""
