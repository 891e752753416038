"""Measuring: a running server from outside, and parts of the engine in this process."""
