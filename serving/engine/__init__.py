"""Engines behind one protocol, the host that runs one, and the replica that owns it."""
