"""A model's files: where they are, what the small ones say, GGUF files, and what messages call them."""
