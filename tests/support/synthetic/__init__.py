"""An OpenAI-compatible server of exactly known latency, to measure measuring clients with."""
