"""`/classify`."""
