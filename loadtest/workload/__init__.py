"""What a load test sends: arrivals, lengths, shared prefixes, sessions, and exact prompts."""
