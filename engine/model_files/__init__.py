"""A model's files: where they are, what the small ones say, GGUF files, names in messages."""
