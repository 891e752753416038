"""Workloads' contents, one kind a file: each makes dialogues from a seed, or from a file."""
