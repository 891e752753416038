"""Admission: who is let in, and what those who are not are told."""
