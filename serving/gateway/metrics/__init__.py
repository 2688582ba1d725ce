"""Presents a gateway's numbers as Prometheus families, and the page of them."""
