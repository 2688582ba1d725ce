"""From an engine's tokens to the bytes of a stream: what waits, what is joined, what is written."""
