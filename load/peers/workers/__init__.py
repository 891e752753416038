"""What runs under a rival's own Python, or its code, as `python -m`; it needs little of ours."""
