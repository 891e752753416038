"""`/v1/conversations`."""
