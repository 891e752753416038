"""GGUF files, read on our own: their keys and tensors, and the model directory they stand for."""
