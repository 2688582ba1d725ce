"""Grammars that clients send: compiled once in a process that may die of them, before an engine."""
