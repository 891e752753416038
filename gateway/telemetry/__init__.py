"""Metrics, the request log, and traces."""
