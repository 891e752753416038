"""The built-in demo model: its training, and the checkpoint in `model/`."""
