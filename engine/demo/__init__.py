"""The built-in demo model: how it is made, and the checkpoint itself in `model/`."""
