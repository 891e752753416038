"""Vectors, scores and labels instead of tokens: what a model does, pairs of texts, encoders, and
the numbers themselves."""
