"""Rivals side by side with ours: the same machine, weights and requests, in the same run."""
