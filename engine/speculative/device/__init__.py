"""Models that guess tokens: a small one of the same vocabulary, or an EAGLE-3 head."""
