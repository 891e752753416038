"""One file per API: parse its parameters, generate, and shape the answer as that API does."""
