"""`/rerank` and `/score`."""
