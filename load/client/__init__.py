"""The measuring client: calls over SSE or WebSocket, and what was seen of each."""
