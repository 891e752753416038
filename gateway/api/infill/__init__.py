"""`POST /infill`."""
