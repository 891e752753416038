"""The engine in one's own process, without a server: `LLM`, what it takes and what it returns."""
