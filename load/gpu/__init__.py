"""`make gpu`: how near the kernels and the engine come to what the card can do."""
