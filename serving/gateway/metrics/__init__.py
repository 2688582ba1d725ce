"""Presents a gateway's numbers as Prometheus families, and as one page."""
