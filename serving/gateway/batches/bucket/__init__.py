"""Keeps the batch lane in a bucket, for gateways on any number of nodes."""
