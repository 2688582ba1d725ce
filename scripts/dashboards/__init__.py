"""Grafana's dashboards, written from one source."""
