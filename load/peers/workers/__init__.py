"""What runs under a rival's own Python, as `python -m`; it needs nothing of ours but itself."""
