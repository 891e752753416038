"""uvicorn's protocols with limits, event streams, and the chat page."""
