"""The Responses API, over HTTP and WebSocket: create, run, read, carry on."""
