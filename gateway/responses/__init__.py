"""The Responses API: what a response is, how it is written down, run, read and carried on."""
