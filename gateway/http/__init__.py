"""Connections: uvicorn's protocols with limits, event streams, the chat page."""
