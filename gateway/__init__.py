"""The streaming front ends: HTTP, SSE and WebSocket in front of an engine in another process.

No torch here, and no policy of the engine's: a gateway turns text into token ids, hands them
over a Unix socket to the engine, and turns what comes back into each API's events.
"""
