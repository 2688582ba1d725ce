"""Plans the requests of a load test: arrivals, lengths, prefixes, sessions, exact prompts."""
