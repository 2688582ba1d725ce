"""Engines behind one protocol, and the host that runs one."""
