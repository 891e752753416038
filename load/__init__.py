"""Measuring a running server from outside."""
