"""Admission control: rate limits, queue bounds, deadlines, and refusals with a time to retry."""
