"""Models of `transformers` that have no definition here: its modules, with our attention and KV."""
