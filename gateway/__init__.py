"""The gateway: HTTP, SSE and WebSocket in front of an engine in another process.

It turns text into token ids, sends them to the engine over a Unix socket, and turns the engine's
outputs into each API's events.
"""
