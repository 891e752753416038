"""The Responses API over HTTP and WebSocket."""
