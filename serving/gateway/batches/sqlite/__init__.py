"""Keeps the batch lane in a folder of one node."""
